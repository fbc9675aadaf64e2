// replay.h - the two io objects handed to llama.cpp: one records, one replays.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <vector>

#include "error.h"
#include "llama-io.h"
#include "memory.h"

namespace gufo {

// Notes the metadata bytes and which tensor ranges would be written; copies no tensor.
class recorder : public llama_io_write_i {
public:
    std::vector<uint8_t> meta;
    std::vector<tensor_range> tensors;

    void write(const void * src, size_t size) override {
        const auto * p = static_cast<const uint8_t *>(src);
        meta.insert(meta.end(), p, p + size);
    }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override { tensors.push_back({tensor, offset, size}); }
    size_t n_bytes() override { return meta.size(); }
};

// Feeds prepared metadata and hands each tensor range to a sink.
class replayer : public llama_io_read_i {
public:
    using sink = std::function<void(ggml_tensor *, size_t offset, size_t size)>;

    replayer(const std::vector<uint8_t> & stream, sink on_tensor) : stream_(stream), on_tensor_(std::move(on_tensor)) {}

    // Upstream swallows what the sink throws and clears the slot; the reason is kept here.
    std::exception_ptr refused;

    void read(void * dst, size_t size) override {
        if (at_ + size > stream_.size()) {
            throw gufo_failure(GUFO_E_REJECTED, "the state's metadata ends early");
        }
        std::memcpy(dst, stream_.data() + at_, size);
        at_ += size;
    }
    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        try {
            on_tensor_(tensor, offset, size);
        } catch (...) {
            refused = std::current_exception();
            throw;
        }
    }
    size_t n_bytes() override { return at_; }

private:
    const std::vector<uint8_t> & stream_;
    sink on_tensor_;
    size_t at_ = 0;
};

struct byte_writer {
    std::vector<uint8_t> data;
    void bytes(const void * src, size_t n) {
        const auto * p = static_cast<const uint8_t *>(src);
        data.insert(data.end(), p, p + n);
    }
    void u32(uint32_t v) { bytes(&v, sizeof(v)); }
};

}  // namespace gufo
