// private_loader.cpp - see private_loader.h.
#include "private_loader.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.h"

namespace gufo {

void private_loader::plan() {
    private_header header;
    std::memcpy(&header, header_.data(), sizeof(header));
    if (header.magic != private_magic || header.layout != layout_version) {
        throw gufo_failure(GUFO_E_REJECTED, "the private state is of another layout");
    }
    if (header.n_tokens != n_tokens_) {
        throw gufo_failure(GUFO_E_REJECTED, "the private state is at token " + std::to_string(header.n_tokens) + ", the restore at " + std::to_string(n_tokens_));
    }
    if (mem_.has_recurrent()) {
        for (const tensor_range & range : mem_.place_recurrent(slot_, n_tokens_)) {
            sections_.push_back({range});
        }
        n_recurrent_ = sections_.size();
    }
    if (const size_t cells = mem_.ring_cells()) {
        sections_.push_back({{nullptr, 0, 4 * cells}});
        for (const row_tensor & r : mem_.ring_rows(slot_)) {
            sections_.push_back({{r.tensor, 0, r.row_bytes * cells}});
        }
    }
}

void private_loader::locate() {
    if (n_recurrent_ == 0) {
        return;
    }
    const std::vector<tensor_range> now = mem_.recurrent_ranges(slot_, n_tokens_);
    for (size_t i = 0; i < n_recurrent_; ++i) {
        sections_[i].range = now.at(i);
    }
}

void private_loader::feed(transfer & io, const uint8_t * data, size_t n) {
    if (fed_ + n > mem_.private_bytes()) {
        throw gufo_failure(GUFO_E_REJECTED, "the private state is longer than the " + std::to_string(mem_.private_bytes()) + " bytes of this layout");
    }
    fed_ += n;
    if (header_.size() < sizeof(private_header)) {
        const size_t take = std::min(n, sizeof(private_header) - header_.size());
        header_.insert(header_.end(), data, data + take);
        data += take;
        n -= take;
        if (header_.size() < sizeof(private_header)) {
            return;
        }
        plan();
    }
    locate();
    while (n > 0) {
        const tensor_range & range = sections_[current_].range;
        const size_t take = std::min(n, range.n_bytes - in_section_);
        if (range.tensor) {
            io.in(range.tensor, range.offset + in_section_, data, take);
        } else {
            table_.insert(table_.end(), data, data + take);
        }
        data += take;
        n -= take;
        in_section_ += take;
        if (in_section_ == range.n_bytes) {
            ++current_;
            in_section_ = 0;
        }
    }
    if (complete() && !table_.empty()) {
        mem_.set_ring(slot_, n_tokens_, table_.data());
    }
}

void private_loader::wipe(transfer & io) {
    locate();
    for (size_t i = 0; i < sections_.size() && i <= current_; ++i) {
        if (sections_[i].range.tensor) {
            io.zero(sections_[i].range.tensor, sections_[i].range.offset, sections_[i].range.n_bytes);
        }
    }
}

}  // namespace gufo
