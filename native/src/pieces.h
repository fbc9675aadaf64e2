// pieces.h - rows that lie in many host buffers, and how few copies move them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gufo.h"

namespace gufo {

struct piece_run {
    uint32_t n;     // pieces from the first on that one copy per tensor can move
    size_t stride;  // from one buffer to the next; 0 for a single piece
};

// Whole buffers of equal rows that continue each other and lie at one distance in one allocation (a
// device refuses a copy that crosses from one pinned allocation into another, however close they lie).
inline piece_run first_run(const gufo_piece * pieces, uint32_t n_pieces) {
    const auto address = [&](uint32_t i) { return reinterpret_cast<uintptr_t>(pieces[i].buffer); };
    const auto whole = [&](uint32_t i) { return pieces[i].n == pieces[0].n && pieces[i].buffer_rows == pieces[0].n; };
    uint32_t n = 1;
    while (n < n_pieces && whole(0) && whole(n) && pieces[n].region == pieces[0].region &&
           pieces[n].first == pieces[n - 1].first + pieces[0].n && address(n) > address(n - 1) &&
           address(n) - address(n - 1) == address(1) - address(0)) {
        ++n;
    }
    return {n, n > 1 ? address(1) - address(0) : 0};
}

}  // namespace gufo
