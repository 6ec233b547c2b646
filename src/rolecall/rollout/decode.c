/* One decoding step's small pieces, each fused into one pass: what torch does in many calls over tiny tensors.
 *
 * Compiled at first use by policy/compiled.py for the machine it runs on; llama.py and sampler.py hold the same maths in torch.
 * Everything is computed in float, whatever the storage type. Work is split over rows and heads in a fixed order, so the
 * same input gives the same bits.
 */
#include <math.h>

#include "storage.h"

#define KERNELS(T, get, put)                                                                                           \
    /* Rotate queries and keys, store the new key and value, attend over the row's tokens.                             \
     * qkv [rows, heads + 2 kv, width], cos and sin [rows, width / 2], keys and values [slots, kv, room, width],       \
     * lengths [rows] = tokens before this one, out [rows, heads, width]. */                                           \
    void attend_##T(const T *qkv, const float *cos, const float *sin, T *keys, T *values, const int64_t *lengths,      \
                    T *out, int64_t rows, int64_t heads, int64_t kv, int64_t width, int64_t room, float scale,         \
                    int threads) {                                                                                     \
        int64_t group = heads / kv, half = width / 2;                                                                  \
        _Pragma("omp parallel for collapse(2) schedule(static) num_threads(threads)")                                  \
        for (int64_t r = 0; r < rows; r++)                                                                             \
            for (int64_t h = 0; h < kv; h++) {                                                                         \
                const T *row = qkv + r * (heads + 2 * kv) * width;                                                     \
                const float *c = cos + r * half, *s = sin + r * half;                                                  \
                int64_t n = lengths[r] + 1;                                                                            \
                T *k = keys + (r * kv + h) * room * width, *v = values + (r * kv + h) * room * width;                  \
                const T *fresh = row + (heads + h) * width;                                                            \
                for (int64_t d = 0; d < half; d++) {                                                                   \
                    float a = get(fresh + d), b = get(fresh + half + d);                                               \
                    put(k + (n - 1) * width + d, a * c[d] - b * s[d]);                                                 \
                    put(k + (n - 1) * width + half + d, b * c[d] + a * s[d]);                                          \
                }                                                                                                      \
                memcpy(v + (n - 1) * width, row + (heads + kv + h) * width, width * sizeof(T));                        \
                float q[width], score[n], sum[width];                                                                  \
                for (int64_t g = 0; g < group; g++) {                                                                  \
                    const T *query = row + (h * group + g) * width;                                                    \
                    for (int64_t d = 0; d < half; d++) {                                                               \
                        float a = get(query + d), b = get(query + half + d);                                           \
                        q[d] = (a * c[d] - b * s[d]) * scale;                                                          \
                        q[half + d] = (b * c[d] + a * s[d]) * scale;                                                   \
                    }                                                                                                  \
                    float top = -INFINITY, total = 0;                                                                  \
                    for (int64_t t = 0; t < n; t++) {                                                                  \
                        const T *key = k + t * width;                                                                  \
                        float dot = 0;                                                                                 \
                        for (int64_t d = 0; d < width; d++) dot += q[d] * get(key + d);                                \
                        score[t] = dot;                                                                                \
                        top = dot > top ? dot : top;                                                                   \
                    }                                                                                                  \
                    for (int64_t t = 0; t < n; t++) {                                                                  \
                        score[t] = expf(score[t] - top);                                                               \
                        total += score[t];                                                                             \
                    }                                                                                                  \
                    for (int64_t d = 0; d < width; d++) sum[d] = 0;                                                    \
                    for (int64_t t = 0; t < n; t++) {                                                                  \
                        const T *value = v + t * width;                                                                \
                        for (int64_t d = 0; d < width; d++) sum[d] += score[t] * get(value + d);                       \
                    }                                                                                                  \
                    T *result = out + (r * heads + h * group + g) * width;                                             \
                    for (int64_t d = 0; d < width; d++) put(result + d, sum[d] / total);                               \
                }                                                                                                      \
            }                                                                                                          \
    }                                                                                                                  \
                                                                                                                       \
    /* x += added, if there is any; out = weight * x / rms(x). All [rows, width]. */                                   \
    void add_norm_##T(T *x, const T *added, const T *weight, T *out, int64_t rows, int64_t width, float eps,           \
                      int threads) {                                                                                   \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t r = 0; r < rows; r++) {                                                                           \
            T *here = x + r * width;                                                                                   \
            float squares = 0;                                                                                         \
            if (added)                                                                                                 \
                for (int64_t d = 0; d < width; d++) put(here + d, get(here + d) + get(added + r * width + d));         \
            for (int64_t d = 0; d < width; d++) squares += get(here + d) * get(here + d);                              \
            float factor = 1 / sqrtf(squares / width + eps);                                                           \
            for (int64_t d = 0; d < width; d++) put(out + r * width + d, get(weight + d) * (get(here + d) * factor));  \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* out = silu(gate) * up from gate_up [rows, 2 width]. */                                                          \
    void gated_##T(const T *gate_up, T *out, int64_t rows, int64_t width, int threads) {                               \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t r = 0; r < rows; r++)                                                                             \
            for (int64_t d = 0; d < width; d++) {                                                                      \
                float gate = get(gate_up + r * 2 * width + d), up = get(gate_up + r * 2 * width + width + d);          \
                put(out + r * width + d, gate / (1 + expf(-gate)) * up);                                               \
            }                                                                                                          \
    }                                                                                                                  \
                                                                                                                       \
    /* The token whose slice of the CDF holds u, and its log-prob, from logits [rows, vocab] times `sharpness`.        \
     * Sums over blocks of 256 are float, across blocks double, as in sampler.py. */                                   \
    void draw_##T(const T *logits, const double *u, int64_t *tokens, float *logprobs, int64_t rows, int64_t vocab,     \
                  float sharpness, int threads) {                                                                      \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t r = 0; r < rows; r++) {                                                                           \
            const T *z = logits + r * vocab;                                                                           \
            float top = -INFINITY;                                                                                     \
            for (int64_t i = 0; i < vocab; i++) top = get(z + i) > top ? get(z + i) : top;                             \
            int64_t blocks = (vocab + 255) / 256;                                                                      \
            float sums[blocks];                                                                                        \
            double total = 0;                                                                                          \
            for (int64_t b = 0; b < blocks; b++) {                                                                     \
                int64_t end = (b + 1) * 256 < vocab ? (b + 1) * 256 : vocab;                                           \
                float sum = 0;                                                                                         \
                for (int64_t i = b * 256; i < end; i++) sum += expf((get(z + i) - top) * sharpness);                   \
                sums[b] = sum;                                                                                         \
                total += sum;                                                                                          \
            }                                                                                                          \
            double goal = u[r] * total, before = 0;                                                                    \
            int64_t block = 0, token = -1;                                                                             \
            tokens[r] = -1; /* stays if the logits are not finite */                                                   \
            logprobs[r] = 0;                                                                                           \
            if (!isfinite(total)) continue;                                                                            \
            while (block < blocks - 1 && before + sums[block] <= goal) before += sums[block++];                        \
            while (block > 0 && !(sums[block] > 0)) before -= sums[--block];                                           \
            int64_t end = (block + 1) * 256 < vocab ? (block + 1) * 256 : vocab;                                       \
            for (int64_t i = block * 256; i < end; i++) {                                                              \
                float weight = expf((get(z + i) - top) * sharpness);                                                   \
                if (weight > 0) token = i;                                                                             \
                before += weight;                                                                                      \
                if (before > goal && weight > 0) break;                                                                \
            }                                                                                                          \
            tokens[r] = token;                                                                                         \
            logprobs[r] = (get(z + token) - top) * sharpness - (float)log(total);                                      \
        }                                                                                                              \
    }

KERNELS(f32, get_f32, put_f32)
KERNELS(bf16, get_bf16, put_bf16)
