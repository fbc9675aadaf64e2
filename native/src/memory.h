// memory.h - what one llama_context remembers, taken apart into components.
//
// llama.cpp writes and reads a sequence's state as one stream of metadata and tensors through an
// io object.  We hand it io objects of our own: one that records which tensors, offsets and
// metadata it would write (that is the inventory), and one that replays such metadata with other
// positions while leaving the tensors alone (that sets the cells of a slot, whose rows we then
// copy ourselves).  So the cell bookkeeping stays upstream's, and no upstream file is patched.
//
// Memory kinds: plain KV, hybrid (KV + recurrent), hybrid with an indexer, recurrent, and
// sliding-window (iSWA), whose window is rows with swa_full and one private ring without.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml.h"

struct llama_context;
class llama_kv_cache;
class llama_memory_recurrent;

namespace gufo {

// One tensor that holds rows of a slot; row j of the slot starts at j * row_bytes.
struct row_tensor {
    std::string id;
    ggml_tensor * tensor;
    size_t row_bytes;
};

struct tensor_range {
    ggml_tensor * tensor;
    size_t offset;
    size_t n_bytes;
};

struct component_info {
    std::string id;
    bool is_rows;
    std::string dtype;
    size_t n_bytes;
    uint32_t layout;
};

// First bytes of every private payload.
struct private_header {
    uint32_t magic;
    uint32_t layout;
    int32_t n_tokens;
    uint32_t reserved;
};
constexpr uint32_t private_magic = 0x4f465547;  // "GUFO"
constexpr uint32_t layout_version = 1;

class memory {
public:
    // Decodes two tokens in every slot to see the state's shape, then clears everything.
    // Throws gufo_failure(GUFO_E_UNSUPPORTED) for a kind that cannot be saved exactly.
    memory(llama_context * ctx, uint32_t n_slots);

    const std::string & kind() const { return kind_; }
    const std::vector<component_info> & components() const { return components_; }
    size_t row_bytes() const { return row_bytes_; }
    size_t private_bytes() const { return private_bytes_; }
    bool may_truncate() const { return !recr_ && !ring_; }

    const std::vector<row_tensor> & rows(uint32_t slot) const { return rows_[slot]; }

    // Throws unless row j of the slot is the token at position j, for all j in [first, first + n).
    void require_rows(uint32_t slot, uint32_t first, uint32_t n) const;

    // The number of tokens every part agrees on; throws when they differ.
    int32_t position(uint32_t slot) const;
    std::vector<int32_t> positions(uint32_t slot) const;

    void private_out(uint32_t slot, int32_t n_tokens, uint8_t * dst) const;
    // For private_loader. Gives the slot's recurrent state a place at this position: where it goes.
    bool has_recurrent() const { return recr_ != nullptr; }
    std::vector<tensor_range> place_recurrent(uint32_t slot, int32_t n_tokens);
    // Where it lies now: the next decode of any slot may move it.
    std::vector<tensor_range> recurrent_ranges(uint32_t slot, int32_t n_tokens) const;
    size_t ring_cells() const;  // 0: no ring
    const std::vector<row_tensor> & ring_rows(uint32_t slot) const { return ring_rows_[slot]; }
    // Sets the ring's cells from a table of int32 positions (-1 = free); refuses an impossible one.
    void set_ring(uint32_t slot, int32_t n_tokens, const uint8_t * table);
    // Makes cells [0, n) of every row cache carry tokens 0 .. n-1 at positions 0 .. n-1.
    void set_cells(uint32_t slot, const int32_t * tokens, uint32_t n);
    void truncate(uint32_t slot, int32_t n_tokens);
    // Bookkeeping of the slot (positions, cell extras) as upstream would write it; for tests.
    std::vector<uint8_t> metadata(uint32_t slot) const;

private:
    // The stream upstream writes for one slot of one KV cache, cut where the cell list begins and ends.
    struct kv_template {
        llama_kv_cache * kv;
        std::vector<std::vector<uint8_t>> data_section;  // per slot: everything after the cell list
        bool has_ext;
        bool ext_2d;  // 2-D positions follow the token position
    };

    void classify();
    void probe();
    void probe_decode();
    void list_tensors();
    kv_template describe(llama_kv_cache * kv, const std::string & prefix, bool as_rows);
    void replay_cells(const kv_template & t, uint32_t slot, const std::vector<uint32_t> & cells,
                      const std::vector<int32_t> & pos, const int32_t * tokens) const;

    llama_context * ctx_;
    uint32_t n_slots_;
    std::string kind_;
    llama_kv_cache * attn_ = nullptr;
    llama_kv_cache * idx_ = nullptr;
    llama_kv_cache * window_ = nullptr;  // of iSWA
    bool ring_ = false;                  // the window is a ring: private
    llama_memory_recurrent * recr_ = nullptr;

    std::vector<kv_template> row_caches_;
    std::vector<kv_template> ring_cache_;  // none or one
    std::vector<std::vector<row_tensor>> rows_;       // [slot]
    std::vector<std::vector<row_tensor>> ring_rows_;  // [slot]
    std::vector<std::vector<uint8_t>> recr_stream_;   // [slot]: metadata upstream writes for one state
    std::vector<component_info> components_;
    size_t row_bytes_ = 0;
    size_t private_bytes_ = 0;
};

}  // namespace gufo
