// memory.cpp - see memory.h.
#include "memory.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <numeric>
#include <typeinfo>

#include "cells.h"
#include "error.h"
#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "replay.h"
#include "transfer.h"

namespace gufo {

namespace {

// Tokens decoded per slot while probing: with two, the 2-D position of the second tells whether
// text positions are copied into it (0 would look the same as "absent").
constexpr int n_probe = 2;

// Fewer cells than this are set sooner than a thread starts.
constexpr uint32_t threads_from = 4096;

std::string tensor_id(const std::string & prefix, const ggml_tensor * tensor) {
    std::string name = tensor->name;
    const size_t view = name.find(" (view)");
    if (view != std::string::npos) {
        name.resize(view);
    }
    return prefix + name;
}

// A mangled class name without its length prefix; compilers that do not mangle so keep theirs.
std::string plain_name(const std::type_info & type) {
    const std::string name = type.name();
    const size_t start = name.find_first_not_of("0123456789");
    return start == std::string::npos ? name : name.substr(start);
}

[[noreturn]] void unsupported(const std::string & why) {
    throw gufo_failure(GUFO_E_UNSUPPORTED, why);
}

}  // namespace

memory::memory(llama_context * ctx, uint32_t n_slots) : ctx_(ctx), n_slots_(n_slots) {
    classify();
    llama_memory_t mem = llama_get_memory(ctx_);
    llama_memory_clear(mem, true);
    try {
        probe();
    } catch (...) {
        llama_memory_clear(mem, true);  // the context may still be run without state
        throw;
    }
    llama_memory_clear(mem, true);
}

void memory::classify() {
    llama_memory_t mem = llama_get_memory(ctx_);
    if (!mem) {
        unsupported("this model keeps no memory between tokens");
    }
    // exact types: a class derived from one of these may carry state we have not listed
    const std::type_info & type = typeid(*mem);
    if (type == typeid(llama_kv_cache)) {
        kind_ = "kv";
        attn_ = static_cast<llama_kv_cache *>(mem);
    } else if (type == typeid(llama_memory_hybrid_idx)) {
        auto * m = static_cast<llama_memory_hybrid_idx *>(mem);
        if (m->get_kpool() > 0) {
            unsupported("hybrid memory with pooled indexer keys: the pools are rewritten, so its rows are not append-only");
        }
        kind_ = "hybrid_idx";
        attn_ = m->get_mem_attn();
        recr_ = m->get_mem_recr();
        idx_ = m->get_mem_idx();
    } else if (type == typeid(llama_memory_hybrid)) {
        auto * m = static_cast<llama_memory_hybrid *>(mem);
        kind_ = "hybrid";
        attn_ = m->get_mem_attn();
        recr_ = m->get_mem_recr();
    } else if (type == typeid(llama_memory_recurrent)) {
        kind_ = "recurrent";
        recr_ = static_cast<llama_memory_recurrent *>(mem);
    } else if (type == typeid(llama_kv_cache_iswa)) {
        auto * m = static_cast<llama_kv_cache_iswa *>(mem);
        kind_ = "iswa";
        attn_ = m->get_base();
        window_ = m->get_swa();
        ring_ = window_->get_size() < attn_->get_size();
    } else {
        unsupported("memory kind " + plain_name(type) + " is not known to this build; its state cannot be proven complete");
    }
    if (recr_ && n_gpus(ctx_) > 1) {
        unsupported(
            "recurrent state with layers on several GPUs: of 430 comparisons on two GPUs one differed, so its exactness is not "
            "proven; let the process see one GPU (CUDA_VISIBLE_DEVICES=0, HIP_VISIBLE_DEVICES=0)");
    }
    if (recr_ && recr_->n_rs_seq != 0) {
        unsupported("recurrent rollback planes (n_rs_seq > 0) are not part of the state layout");
    }
    for (const llama_kv_cache * kv : {attn_, idx_, window_}) {
        if (kv && kv->get_n_stream() != n_slots_) {
            unsupported("slots share one KV stream (kv_unified); rows of a slot must lie in a stream of its own");
        }
    }
}

void memory::probe() {
    // In a thread that ends: OpenMP keeps a team for every thread that ever computed, and puts all of
    // them to sleep at each barrier once they are more than the cores (10 % of decode, measured).
    std::async(std::launch::async, [this] { probe_decode(); }).get();
    ctx_->synchronize();
    list_tensors();
}

void memory::probe_decode() {
    for (uint32_t s = 0; s < n_slots_; ++s) {  // one batch each: probing must fit any n_batch
        llama_token tokens[n_probe] = {0, 0};
        llama_pos pos[n_probe] = {0, 1};
        int32_t n_seq[n_probe] = {1, 1};
        llama_seq_id seq = static_cast<llama_seq_id>(s);
        llama_seq_id * seqs[n_probe] = {&seq, &seq};
        int8_t logits[n_probe] = {0, 1};
        llama_batch batch{n_probe, tokens, nullptr, pos, n_seq, seqs, logits};
        const int rc = llama_decode(ctx_, batch);
        if (rc != 0) {
            throw gufo_failure(GUFO_E_BACKEND, "the first decode failed with code " + std::to_string(rc));
        }
    }
}

void memory::list_tensors() {
    rows_.resize(n_slots_);
    ring_rows_.resize(n_slots_);
    if (attn_) {
        row_caches_.push_back(describe(attn_, "", true));
    }
    if (idx_) {
        row_caches_.push_back(describe(idx_, "", true));
    }
    if (window_) {
        kv_template t = describe(window_, "window_", !ring_);
        (ring_ ? ring_cache_ : row_caches_).push_back(std::move(t));
    }
    for (const row_tensor & r : rows_[0]) {
        components_.push_back({r.id, true, ggml_type_name(r.tensor->type), r.row_bytes, layout_version});
        row_bytes_ += r.row_bytes;
    }
    if (recr_ || ring_) {
        components_.push_back({"position", false, "header", sizeof(private_header), layout_version});
    }
    if (recr_) {
        recr_stream_.resize(n_slots_);
        for (uint32_t s = 0; s < n_slots_; ++s) {
            recorder rec;
            recr_->state_write(rec, static_cast<llama_seq_id>(s), 0);
            recr_stream_[s] = rec.meta;
            if (s == 0) {
                for (const tensor_range & t : rec.tensors) {
                    if (t.n_bytes == 0) {
                        continue;  // an architecture without this part (lfm2 has no s) keeps an empty tensor
                    }
                    components_.push_back({tensor_id("", t.tensor), false, ggml_type_name(t.tensor->type), t.n_bytes, layout_version});
                }
            }
        }
    }
    if (ring_) {
        components_.push_back({"window_cells", false, "i32", 4 * static_cast<size_t>(window_->get_size()), layout_version});
        for (const row_tensor & r : ring_rows_[0]) {
            components_.push_back({r.id, false, ggml_type_name(r.tensor->type), r.row_bytes * window_->get_size(), layout_version});
        }
    }
    for (const component_info & c : components_) {
        private_bytes_ += c.is_rows ? 0 : c.n_bytes;
    }
}

memory::kv_template memory::describe(llama_kv_cache * kv, const std::string & prefix, bool as_rows) {
    kv_template t{kv, {}, kv->has_cell_ext(), false};
    const uint32_t n_stream = kv->get_n_stream();
    const size_t cell_bytes = 4 + 4 + (t.has_ext ? sizeof(llama_kv_cell_ext) : 0) + 4;
    for (uint32_t s = 0; s < n_slots_; ++s) {
        recorder rec;
        kv->state_write(rec, static_cast<llama_seq_id>(s), 0);
        const uint32_t stream = kv->get_stream(static_cast<llama_seq_id>(s));
        // n_stream, then 4 bytes for each empty stream around: [n_stream][0]..[2][cells][data][0]..
        const size_t begin = 4 + 4 * static_cast<size_t>(stream) + 4 + n_probe * cell_bytes;
        const size_t after = 4 * static_cast<size_t>(n_stream - stream - 1);
        if (rec.meta.size() < begin + after + 8) {
            unsupported("a KV cache writes its state in a layout this build does not know");
        }
        t.data_section.emplace_back(rec.meta.begin() + begin, rec.meta.end() - after);
        uint32_t v_trans;
        std::memcpy(&v_trans, t.data_section.back().data(), 4);
        if (v_trans != 0) {
            unsupported("the V cache is transposed (flash attention off); its rows are not contiguous");
        }
        if (t.has_ext) {
            llama_kv_cell_ext ext;
            std::memcpy(&ext, rec.meta.data() + begin - cell_bytes + 8, sizeof(ext));
            t.ext_2d = ext.x == 1 && ext.y == 1;
        }
        for (const tensor_range & r : rec.tensors) {
            if (r.offset != 0 || r.n_bytes % n_probe != 0) {
                unsupported("a KV cache does not start a slot at its first cell");
            }
            (as_rows ? rows_ : ring_rows_)[s].push_back({tensor_id(prefix, r.tensor), r.tensor, r.n_bytes / n_probe});
        }
    }
    return t;
}

void memory::require_rows(uint32_t slot, uint32_t first, uint32_t n) const {
    for (const kv_template & t : row_caches_) {
        const llama_kv_cells & cells = t.kv->get_cells(static_cast<llama_seq_id>(slot));
        if (first + n > cells.size()) {
            throw gufo_failure(GUFO_E_INVALID, "rows " + std::to_string(first) + "+" + std::to_string(n) + " reach beyond the slot's " +
                                                   std::to_string(cells.size()) + " cells");
        }
        for (uint32_t j = first; j < first + n; ++j) {
            if (cells.is_empty(j) || cells.pos_get(j) != static_cast<llama_pos>(j)) {
                throw gufo_failure(GUFO_E_INVALID, "row " + std::to_string(j) + " of slot " + std::to_string(slot) +
                                                       " does not hold the token at that position");
            }
        }
    }
}

std::vector<int32_t> memory::positions(uint32_t slot) const {
    const auto seq = static_cast<llama_seq_id>(slot);
    std::vector<int32_t> out;
    for (const llama_kv_cache * kv : {attn_, idx_, window_}) {
        if (kv) {
            out.push_back(kv->seq_pos_max(seq) + 1);
        }
    }
    if (recr_) {
        out.push_back(recr_->seq_pos_max(seq) + 1);
    }
    return out;
}

int32_t memory::position(uint32_t slot) const {
    const std::vector<int32_t> all = positions(slot);
    for (int32_t p : all) {
        if (p != all.front()) {
            throw gufo_failure(GUFO_E_REJECTED, "the components of slot " + std::to_string(slot) + " are at different positions (" +
                                                    std::to_string(all.front()) + " and " + std::to_string(p) + ")");
        }
    }
    return all.front();
}

std::vector<tensor_range> memory::recurrent_ranges(uint32_t slot, int32_t n_tokens) const {
    recorder rec;
    recr_->state_write(rec, static_cast<llama_seq_id>(slot), 0);
    // same cell count, tensor kinds and sizes as probed; only the position may differ
    const std::vector<uint8_t> & known = recr_stream_[slot];
    int32_t pos = -1;
    if (rec.meta.size() == known.size()) {
        std::memcpy(&pos, rec.meta.data() + 4, 4);
    }
    if (pos + 1 != n_tokens) {
        throw gufo_failure(GUFO_E_INVALID, "slot " + std::to_string(slot) + " holds no recurrent state at " + std::to_string(n_tokens) + " tokens");
    }
    return rec.tensors;
}

void memory::private_out(uint32_t slot, int32_t n_tokens, uint8_t * dst) const {
    transfer io(ctx_);
    const private_header header{private_magic, layout_version, n_tokens, 0};
    std::memcpy(dst, &header, sizeof(header));
    dst += sizeof(header);
    if (recr_) {
        for (const tensor_range & t : recurrent_ranges(slot, n_tokens)) {
            io.out(t.tensor, t.offset, dst, t.n_bytes);
            dst += t.n_bytes;
        }
    }
    if (ring_) {
        const llama_kv_cells & cells = window_->get_cells(static_cast<llama_seq_id>(slot));
        for (uint32_t j = 0; j < cells.size(); ++j) {
            const int32_t pos = cells.is_empty(j) ? -1 : cells.pos_get(j);
            std::memcpy(dst, &pos, 4);
            dst += 4;
        }
        uint8_t * ring = dst;
        for (const row_tensor & r : ring_rows_[slot]) {
            io.out(r.tensor, 0, dst, r.row_bytes * cells.size());
            dst += r.row_bytes * cells.size();
        }
        io.finish();
        // what an earlier sequence left in free cells is not state: the payload is the same without it
        for (const row_tensor & r : ring_rows_[slot]) {
            for (uint32_t j = 0; j < cells.size(); ++j) {
                if (cells.is_empty(j)) {
                    std::memset(ring + j * r.row_bytes, 0, r.row_bytes);
                }
            }
            ring += r.row_bytes * cells.size();
        }
    }
    io.finish();
}

std::vector<tensor_range> memory::place_recurrent(uint32_t slot, int32_t n_tokens) {
    std::vector<uint8_t> stream = recr_stream_[slot];
    const int32_t pos = n_tokens - 1;
    std::memcpy(stream.data() + 4, &pos, 4);
    std::vector<tensor_range> ranges;
    replayer in(stream, [&](ggml_tensor * tensor, size_t offset, size_t size) { ranges.push_back({tensor, offset, size}); });
    recr_->state_read(in, static_cast<llama_seq_id>(slot), 0);
    return ranges;
}

size_t memory::ring_cells() const {
    return ring_ ? window_->get_size() : 0;
}

void memory::set_ring(uint32_t slot, int32_t n_tokens, const uint8_t * table) {
    std::vector<std::pair<int32_t, uint32_t>> held;  // (position, cell), to be set in the order they were written
    for (uint32_t j = 0; j < ring_cells(); ++j) {
        int32_t pos;
        std::memcpy(&pos, table + 4 * static_cast<size_t>(j), 4);
        if (pos < -1 || pos >= n_tokens) {
            throw gufo_failure(GUFO_E_REJECTED, "the window's cell table holds position " + std::to_string(pos));
        }
        if (pos >= 0) {
            held.emplace_back(pos, j);
        }
    }
    std::sort(held.begin(), held.end());
    if (held.empty() || held.back().first != n_tokens - 1) {
        throw gufo_failure(GUFO_E_REJECTED, "the window's cell table does not end at token " + std::to_string(n_tokens));
    }
    for (size_t i = 1; i < held.size(); ++i) {
        if (held[i].first == held[i - 1].first) {
            throw gufo_failure(GUFO_E_REJECTED, "the window's cell table holds position " + std::to_string(held[i].first) + " twice");
        }
    }
    std::vector<uint32_t> cells;
    std::vector<int32_t> pos;
    for (const auto & [p, cell] : held) {
        cells.push_back(cell);
        pos.push_back(p);
    }
    replay_cells(ring_cache_[0], slot, cells, pos, nullptr);
}

void memory::replay_cells(const kv_template & t, uint32_t slot, const std::vector<uint32_t> & cells, const std::vector<int32_t> & pos,
                          const int32_t * tokens) const {
    const auto seq = static_cast<llama_seq_id>(slot);
    const uint32_t n_stream = t.kv->get_n_stream();
    const uint32_t stream = t.kv->get_stream(seq);
    byte_writer out;
    out.u32(n_stream);
    for (uint32_t s = 0; s < n_stream; ++s) {
        if (s != stream) {
            out.u32(0);
            continue;
        }
        out.u32(static_cast<uint32_t>(cells.size()));
        for (size_t i = 0; i < cells.size(); ++i) {
            out.u32(static_cast<uint32_t>(pos[i]));
            out.u32(1);
            if (t.has_ext) {
                llama_kv_cell_ext ext;
                ext.x = ext.y = t.ext_2d ? pos[i] : 0;
                ext.tok = tokens ? tokens[i] : LLAMA_TOKEN_NULL;
                out.bytes(&ext, sizeof(ext));
            }
            out.u32(slot);
        }
        out.bytes(t.data_section[slot].data(), t.data_section[slot].size());
    }
    llama_kv_cache::slot_info_vec_t layout(n_stream);
    llama_kv_cache::slot_info & mine = layout[stream];
    mine.s0 = mine.s1 = stream;
    mine.resize(1);
    mine.strm[0] = static_cast<llama_seq_id>(stream);
    mine.idxs[0] = cells;
    replayer in(out.data, [](ggml_tensor *, size_t, size_t) {});  // the rows are in place already
    t.kv->state_read_sinfo(in, seq, 0, nullptr, &layout);
}

void memory::set_cells(uint32_t slot, const int32_t * tokens, uint32_t n) {
    const auto set = [&](const kv_template & t) {
        if (change_cells(*t.kv, static_cast<llama_seq_id>(slot), tokens, n, t.ext_2d)) {
            return;
        }
        std::vector<uint32_t> cells(n);
        std::vector<int32_t> pos(n);
        std::iota(cells.begin(), cells.end(), 0u);
        std::iota(pos.begin(), pos.end(), 0);
        replay_cells(t, slot, cells, pos, tokens);
    };
    // a cache has tables of its own: the second one's are set beside the first one's
    std::vector<std::future<void>> beside;
    for (size_t i = 1; i < row_caches_.size(); ++i) {
        const auto how = n < threads_from ? std::launch::deferred : std::launch::async;
        beside.push_back(std::async(how, set, std::cref(row_caches_[i])));
    }
    if (!row_caches_.empty()) {
        set(row_caches_[0]);
    }
    for (std::future<void> & one : beside) {
        one.get();
    }
}

void memory::truncate(uint32_t slot, int32_t n_tokens) {
    const auto seq = static_cast<llama_seq_id>(slot);
    if (n_tokens > 0 && !may_truncate()) {
        throw gufo_failure(GUFO_E_UNSUPPORTED, "a " + kind_ + " memory cannot be cut back to " + std::to_string(n_tokens) + " tokens");
    }
    if (!llama_memory_seq_rm(llama_get_memory(ctx_), seq, n_tokens, -1)) {
        throw gufo_failure(GUFO_E_BACKEND, "llama.cpp refused to cut slot " + std::to_string(slot));
    }
    if (ring_ && n_tokens == 0) {
        // an emptied ring keeps its write head; a fresh one starts at cell 0, and so must this one
        replay_cells(ring_cache_[0], slot, {0}, {0}, nullptr);
        window_->seq_rm(seq, -1, -1);
    }
}

std::vector<uint8_t> memory::metadata(uint32_t slot) const {
    recorder rec;
    llama_get_memory(ctx_)->state_write(rec, static_cast<llama_seq_id>(slot), 0);
    return rec.meta;
}

}  // namespace gufo
