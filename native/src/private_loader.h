// private_loader.h - a private payload on its way into a slot, in pieces of any size.
//
//     [ header ][ recurrent tensors ][ ring cell table ][ ring tensors ]      as memory::private_out wrote it
//
// Header and cell table are looked at; tensor bytes go straight to where they belong.  Other slots
// may run between two feeds, and a joint pass of theirs may move this slot's recurrent cell (with its
// bytes) to another place: where the cell lies is asked for at every feed, never remembered.
#pragma once

#include <cstdint>
#include <vector>

#include "memory.h"
#include "transfer.h"

namespace gufo {

class private_loader {
public:
    private_loader(memory & mem, uint32_t slot, int32_t n_tokens) : mem_(mem), slot_(slot), n_tokens_(n_tokens) {}

    // The next n bytes. Throws gufo_failure(GUFO_E_REJECTED) for a payload of another layout or position.
    void feed(transfer & io, const uint8_t * data, size_t n);
    size_t fed() const { return fed_; }
    bool complete() const { return fed_ == mem_.private_bytes(); }
    // Zeroes the tensors that were (partly) filled.
    void wipe(transfer & io);

private:
    struct section {
        tensor_range range;  // tensor == nullptr: host bytes, gathered in host_
    };
    void plan();
    void locate();

    memory & mem_;
    uint32_t slot_;
    int32_t n_tokens_;
    size_t fed_ = 0;
    std::vector<uint8_t> header_;
    std::vector<uint8_t> table_;
    std::vector<section> sections_;
    size_t n_recurrent_ = 0;  // the first sections
    size_t current_ = 0;   // section being filled
    size_t in_section_ = 0;
};

}  // namespace gufo
