// cells.cpp - see cells.h.
#include "cells.h"

#include "llama-batch.h"
#include "llama-kv-cache.h"

namespace gufo {

namespace {

// The number of cells held, if they are [0, m) with token j in cell j of this slot alone; else false.
bool plain_prefix(const llama_kv_cells & cells, llama_seq_id slot, uint32_t & m) {
    m = cells.get_used();
    if (cells.get_has_shift() || m > cells.size()) {
        return false;
    }
    for (uint32_t j = 0; j < m; ++j) {
        if (cells.is_empty(j) || cells.pos_get(j) != static_cast<llama_pos>(j) || !cells.seq_has(j, slot) || cells.seq_count(j) != 1) {
            return false;
        }
    }
    return true;
}

// As if a pass had just put tokens [first, first + n) there: that also moves the search head.
void add_cells(llama_kv_cache & kv, llama_seq_id slot, const llama_token * tokens, uint32_t first, uint32_t n, bool with_2d) {
    llama_batch_allocr allocator(with_2d ? 4 : 1);
    llama_ubatch ubatch = allocator.ubatch_reserve(n, 1);
    ubatch.seq_id_unq[0] = slot;
    llama_kv_cache::slot_info where;
    where.s0 = where.s1 = kv.get_stream(slot);
    where.resize(1);
    where.strm[0] = static_cast<llama_seq_id>(where.s0);
    where.idxs[0].resize(n);
    for (uint32_t i = 0; i < n; ++i) {
        const auto pos = static_cast<llama_pos>(first + i);
        where.idxs[0][i] = first + i;
        ubatch.token[i] = tokens[first + i];
        for (uint32_t d = 0; d < ubatch.n_pos; ++d) {
            ubatch.pos[i + d * n] = pos;
        }
        ubatch.n_seq_id[i] = 1;
        ubatch.seq_id[i] = &slot;
    }
    kv.apply_ubatch(where, ubatch);
}

}  // namespace

bool change_cells(llama_kv_cache & kv, llama_seq_id slot, const llama_token * tokens, uint32_t n, bool with_2d) {
    const llama_kv_cells & held = kv.get_cells(slot);
    uint32_t m = 0;
    if (n > held.size() || !plain_prefix(held, slot, m)) {
        return false;
    }
    if (m > n) {
        kv.seq_rm(slot, static_cast<llama_pos>(n), -1);
        m = n;
    }
    // get_cells is the only way in, and hands out const; the cells themselves are not const
    auto & cells = const_cast<llama_kv_cells &>(held);
    for (uint32_t j = 0; j < m; ++j) {
        llama_kv_cell_ext ext;
        ext.x = ext.y = with_2d ? static_cast<llama_pos>(j) : 0;
        ext.tok = tokens[j];
        cells.ext_set(j, ext);
    }
    if (n > m) {
        add_cells(kv, slot, tokens, m, n - m, with_2d);
    }
    return true;
}

}  // namespace gufo
