// logprobs.cpp - log-softmax and the most likely tokens over a whole vocabulary.
//
// Called once per generated token when log-probabilities are asked for, over up to 250,000 logits:
// std::exp alone would take milliseconds.  The loops below are written so that a compiler turns them
// into vector code without -ffast-math: independent lanes, no branches.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "error.h"
#include "gufo.h"

// GCC vectorizes a float comparison only if told that nobody reads the exception flags; values are
// unchanged.  Clang assumes it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math")
#endif

namespace {

constexpr int LANES = 16;
constexpr int BLOCK = 4096;  // float sums stay short; blocks are added in double

// exp(x) for x <= 0 with a relative error below 2e-7 (range reduction to |r| <= ln2/2, Taylor to r^6);
// NaN stays NaN.  Below -87 the result is 1e-38 instead of less: nothing beside the 1 of the maximum.
inline float exp_nonpositive(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
    const float n = shifted - 12582912.0f;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = static_cast<int32_t>((static_cast<uint32_t>(bits) - 0x4B400000u + 127u) << 23);
    float scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}

float maximum(const float * x, int32_t n) {
    float lane[LANES];
    std::fill(lane, lane + LANES, -INFINITY);
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            lane[k] = x[i + k] > lane[k] ? x[i + k] : lane[k];
        }
    }
    float max = *std::max_element(lane, lane + LANES);
    for (; i < n; i++) {
        max = std::max(max, x[i]);
    }
    return max;
}

double sum_exp(const float * x, int32_t n, float max) {
    double sum = 0.0;
    for (int32_t start = 0; start < n; start += BLOCK) {
        const int32_t end = std::min(n, start + BLOCK);
        float lane[LANES] = {};
        int32_t i = start;
        for (; i + LANES <= end; i += LANES) {
            for (int k = 0; k < LANES; k++) {
                lane[k] += exp_nonpositive(x[i + k] - max);
            }
        }
        for (; i < end; i++) {
            lane[0] += exp_nonpositive(x[i] - max);
        }
        for (const float s : lane) {
            sum += s;
        }
    }
    return sum;
}

// A heap whose front is the worst kept one: a single comparison for nearly every token.
std::vector<int32_t> best_of(const float * x, int32_t n, int32_t n_top) {
    const auto better = [&](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
    std::vector<int32_t> best(n_top);
    for (int32_t i = 0; i < n_top; i++) {
        best[i] = i;
    }
    std::make_heap(best.begin(), best.end(), better);
    for (int32_t i = n_top; i < n && n_top > 0; i++) {
        if (x[i] > x[best.front()]) {  // an equal one has the higher id
            std::pop_heap(best.begin(), best.end(), better);
            best.back() = i;
            std::push_heap(best.begin(), best.end(), better);
        }
    }
    std::sort_heap(best.begin(), best.end(), better);
    return best;
}

}  // namespace

extern "C" int gufo_logprobs(const float * logits, int32_t n_vocab, int32_t token, int32_t n_top, int32_t * top_ids,
                             float * top_logprobs, float * token_logprob) {
    return guarded([&] {
        if (!logits || n_vocab <= 0 || token >= n_vocab || n_top < 0 || n_top > n_vocab) {
            return gufo_set_error(GUFO_E_INVALID, "token and n_top must lie within the vocabulary");
        }
        const float max = maximum(logits, n_vocab);
        const double sum = std::isfinite(max) ? sum_exp(logits, n_vocab, max) : NAN;
        if (!std::isfinite(sum)) {
            return gufo_set_error(GUFO_E_BACKEND, "the logits are not numbers");
        }
        const double log_sum = max + std::log(sum);
        const auto best = best_of(logits, n_vocab, n_top);
        for (size_t i = 0; i < best.size(); i++) {
            top_ids[i] = best[i];
            top_logprobs[i] = static_cast<float>(logits[best[i]] - log_sum);
        }
        if (token_logprob) {
            *token_logprob = token < 0 ? 0.0f : static_cast<float>(logits[token] - log_sum);
        }
        return int(GUFO_OK);
    });
}
