// cells.h - the bookkeeping of one KV cache for one slot, changed only where it differs.
//
// A slot that takes a checkpoint usually holds another conversation, with token j in cell j.  Reading
// cells back the way llama.cpp does (state_read) frees all of them and makes them anew, one position,
// one set entry and one stream read at a time: 76 ms for 95,439 tokens in two caches on the H200, 1.6
// times what the rows themselves take.  Most of a cell is right already:
//
//     held   [ 0 .............. m )           n > m:  cells [m, n) are added
//     wanted [ 0 ........ n )                 n < m:  cells [n, m) are freed
//              └ the token changes            (both through llama.cpp's own functions)
//
// Rejected: building the cells aside and swapping them in (as slow, and the search head is private).
#pragma once

#include <cstdint>

#include "llama.h"

class llama_kv_cache;

namespace gufo {

// Makes cells [0, n) of the slot carry tokens[0 .. n-1] at positions 0 .. n-1, and no other cell
// anything.  False, with nothing changed, when the slot's cells are not one plain prefix now: then
// they must be read back as a whole.  with_2d: text positions are kept as 2-D positions too.
bool change_cells(llama_kv_cache & kv, llama_seq_id slot, const llama_token * tokens, uint32_t n, bool with_2d);

}  // namespace gufo
