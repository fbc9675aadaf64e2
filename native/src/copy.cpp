// copy.cpp - see copy.h.
#include "copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gufo {

namespace {

// NaN of 16- or 32-bit floats without comparing: (v & magnitude) + carry sets a lane's top bit for
// values above infinity and never reaches the next lane.
struct lanes {
    uint64_t magnitude;
    uint64_t carry;
    uint64_t top;
};
constexpr lanes f32_lanes = {0x7fffffff7fffffffu, 0x007fffff007fffffu, 0x8000000080000000u};
constexpr lanes f16_lanes = {0x7fff7fff7fff7fffu, 0x03ff03ff03ff03ffu, 0x8000800080008000u};
constexpr lanes bf16_lanes = {0x7fff7fff7fff7fffu, 0x007f007f007f007fu, 0x8000800080008000u};
constexpr lanes no_lanes = {0, 0, 0};

// Below this the caches are the better place.
constexpr size_t stream_from = 32 * 1024;
// Block-quantised pieces are copied and then looked at while they are still in the first-level cache.
constexpr size_t block_piece = 8 * 1024;

// With dst = nullptr only looks.  Returns whether a lane's top bit was set.
bool pass_words(uint8_t * dst, const uint8_t * src, size_t n, const lanes & l) {
    constexpr size_t step = 4 * sizeof(uint64_t);
    uint64_t seen[4] = {0, 0, 0, 0};
    uint64_t w[4];
    size_t i = 0;
    for (; i + step <= n; i += step) {
        std::memcpy(w, src + i, step);
        for (int k = 0; k < 4; ++k) {
            seen[k] |= (w[k] & l.magnitude) + l.carry;
        }
        if (dst) {
            std::memcpy(dst + i, w, step);
        }
    }
    std::memset(w, 0, sizeof(w));
    std::memcpy(w, src + i, n - i);
    for (int k = 0; k < 4; ++k) {
        seen[k] |= (w[k] & l.magnitude) + l.carry;
    }
    if (dst && n > i) {
        std::memcpy(dst + i, src + i, n - i);
    }
    return ((seen[0] | seen[1] | seen[2] | seen[3]) & l.top) != 0;
}

#if defined(__SSE2__)
// 64 bytes at a time past the caches; dst on a 16-byte boundary, n a multiple of 64.
bool stream_words(uint8_t * dst, const uint8_t * src, size_t n, const lanes & l) {
    const __m128i magnitude = _mm_set1_epi64x(static_cast<long long>(l.magnitude));
    const __m128i carry = _mm_set1_epi64x(static_cast<long long>(l.carry));
    __m128i seen[4] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
    for (size_t i = 0; i < n; i += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(src + i + 1024), _MM_HINT_NTA);
        __m128i w[4];
        for (int k = 0; k < 4; ++k) {
            w[k] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(src + i) + k);
            // no carry leaves a lane, so 64-bit addition is as good as one per lane
            seen[k] = _mm_or_si128(seen[k], _mm_add_epi64(_mm_and_si128(w[k], magnitude), carry));
        }
        for (int k = 0; k < 4; ++k) {
            _mm_stream_si128(reinterpret_cast<__m128i *>(dst + i) + k, w[k]);
        }
    }
    _mm_sfence();
    uint64_t all[2];
    _mm_storeu_si128(reinterpret_cast<__m128i *>(all), _mm_or_si128(_mm_or_si128(seen[0], seen[1]), _mm_or_si128(seen[2], seen[3])));
    return ((all[0] | all[1]) & l.top) != 0;
}
#endif

// [head: to a 16-byte boundary of dst)[ streamed, 64 bytes at a time )[ tail )
bool copy_words(uint8_t * dst, const uint8_t * src, size_t n, const lanes & l) {
#if defined(__SSE2__)
    if (n >= stream_from) {
        const size_t head = (16 - reinterpret_cast<uintptr_t>(dst) % 16) % 16;
        const size_t body = (n - head) / 64 * 64;
        bool seen = pass_words(dst, src, head, l);
        seen |= stream_words(dst + head, src + head, body, l);
        return seen | pass_words(dst + head + body, src + head + body, n - head - body, l);
    }
#endif
    return pass_words(dst, src, n, l);
}

const lanes * lanes_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
            return &f32_lanes;
        case GGML_TYPE_F16:
            return &f16_lanes;
        case GGML_TYPE_BF16:
            return &bf16_lanes;
        default:
            return nullptr;
    }
}

// Half-precision scales at the head of each block.
size_t scales_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_1:
            return 2;
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_IQ4_NL:
            return 1;
        default:
            return 0;
    }
}

bool scales_hold_nan(const uint8_t * p, size_t n_bytes, size_t block, size_t n_scales) {
    uint32_t seen = 0;
    for (size_t at = 0; at + block <= n_bytes; at += block) {
        for (size_t s = 0; s < n_scales; ++s) {
            uint16_t v;
            std::memcpy(&v, p + at + 2 * s, sizeof(v));
            seen |= (v & 0x7fffu) + 0x03ffu;
        }
    }
    return (seen & 0x8000u) != 0;
}

}  // namespace

void copy_bytes(void * dst, const void * src, size_t n_bytes) {
#if defined(__SSE2__)
    copy_words(static_cast<uint8_t *>(dst), static_cast<const uint8_t *>(src), n_bytes, no_lanes);
#else
    std::memcpy(dst, src, n_bytes);
#endif
}

bool copy_checked(ggml_type type, void * dst, const void * src, size_t n_bytes) {
    auto * to = static_cast<uint8_t *>(dst);
    const auto * from = static_cast<const uint8_t *>(src);
    bool nan = false;
    if (const lanes * l = lanes_of(type)) {
        nan = copy_words(to, from, n_bytes, *l);
    } else if (const size_t n_scales = scales_of(type)) {
        const size_t block = ggml_type_size(type);
        const size_t piece = block_piece / block * block;
        for (size_t at = 0; at < n_bytes; at += piece) {
            const size_t n = n_bytes - at < piece ? n_bytes - at : piece;
            std::memcpy(to + at, from + at, n);
            nan |= scales_hold_nan(from + at, n, block, n_scales);
        }
    } else {
        copy_bytes(dst, src, n_bytes);
    }
    if (nan) {
        std::memset(dst, 0, n_bytes);
    }
    return !nan;
}

bool holds_nan(ggml_type type, const void * data, size_t n_bytes) {
    const auto * p = static_cast<const uint8_t *>(data);
    if (const lanes * l = lanes_of(type)) {
        return pass_words(nullptr, p, n_bytes, *l);
    }
    const size_t n_scales = scales_of(type);
    return n_scales && scales_hold_nan(p, n_bytes, ggml_type_size(type), n_scales);
}

}  // namespace gufo
