/* The small pieces of a decoder layer, forward and backward, each in one pass: flat.py holds the same maths in torch.
 *
 * The residual stream and the norms' weights are float; what lies between two matrix products is T. Work is split over
 * rows in a fixed order and sums over rows are made per block and then in order, so the same input gives the same bits
 * whatever the number of threads.
 */
#include <math.h>

#include "storage.h"

#define BLOCK 64 /* rows whose weight gradients are added up together */

#define KERNELS(T, get, put)                                                                                           \
    /* x = before + added, if there is any, else before; out = weight * x * factor, factor = 1 / rms(x), which is kept.\
     * All [rows, width]. */                                                                                           \
    void norm_##T(const float *restrict before, const T *restrict added, const float *restrict weight,                 \
                  float *restrict x, T *restrict out, float *restrict factors, int64_t rows, int64_t width, float eps, \
                  int threads) {                                                                                       \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t r = 0; r < rows; r++) {                                                                           \
            const float *here = before + r * width;                                                                    \
            float squares = 0;                                                                                         \
            if (added) {                                                                                               \
                for (int64_t d = 0; d < width; d++) x[r * width + d] = here[d] + get(added + r * width + d);           \
                here = x + r * width;                                                                                  \
            }                                                                                                          \
            for (int64_t d = 0; d < width; d++) squares += here[d] * here[d];                                          \
            float factor = factors[r] = 1 / sqrtf(squares / width + eps);                                              \
            for (int64_t d = 0; d < width; d++) put(out + r * width + d, weight[d] * (here[d] * factor));              \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* dx = above + factor * (g - n * mean(g * n)) with n = x * factor and g = weight * dout, and the same into dadded;\
     * above and dadded may be missing. partial [blocks, width] holds each block's sum of dout * n. */                 \
    void norm_back_##T(const float *restrict x, const float *restrict weight, const float *restrict factors,           \
                       const T *restrict dout, const float *restrict above, float *restrict dx, T *restrict dadded,    \
                       float *restrict partial, int64_t rows, int64_t width, int threads) {                            \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t block = 0; block < (rows + BLOCK - 1) / BLOCK; block++) {                                         \
            float *sums = partial + block * width;                                                                     \
            memset(sums, 0, width * sizeof(float));                                                                    \
            for (int64_t r = block * BLOCK; r < rows && r < (block + 1) * BLOCK; r++) {                                \
                const float *here = x + r * width;                                                                     \
                const T *g = dout + r * width;                                                                         \
                float *result = dx + r * width, factor = factors[r], dot = 0;                                          \
                for (int64_t d = 0; d < width; d++) {                                                                  \
                    float n = here[d] * factor, up = get(g + d);                                                       \
                    sums[d] += up * n;                                                                                 \
                    dot += up * weight[d] * n;                                                                         \
                }                                                                                                      \
                dot /= width;                                                                                          \
                for (int64_t d = 0; d < width; d++)                                                                    \
                    result[d] = factor * (get(g + d) * weight[d] - here[d] * factor * dot);                            \
                if (above)                                                                                             \
                    for (int64_t d = 0; d < width; d++) result[d] += above[r * width + d];                             \
                if (dadded)                                                                                            \
                    for (int64_t d = 0; d < width; d++) put(dadded + r * width + d, result[d]);                        \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* Rotate the first `heads` heads of qkv [rows, stride] in place; sign -1 rotates back. cos, sin [rows, half]. */  \
    void rotate_##T(T *restrict qkv, const float *restrict cos, const float *restrict sin, int64_t rows,               \
                    int64_t stride, int64_t heads, int64_t half, float sign, int threads) {                            \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t r = 0; r < rows; r++)                                                                             \
            for (int64_t h = 0; h < heads; h++) {                                                                      \
                T *head = qkv + r * stride + 2 * h * half;                                                             \
                const float *c = cos + r * half, *s = sin + r * half;                                                  \
                for (int64_t d = 0; d < half; d++) {                                                                   \
                    float a = get(head + d), b = get(head + half + d);                                                 \
                    put(head + d, a * c[d] - sign * b * s[d]);                                                         \
                    put(head + half + d, b * c[d] + sign * a * s[d]);                                                  \
                }                                                                                                      \
            }                                                                                                          \
    }                                                                                                                  \
                                                                                                                       \
    /* out = silu(gate) * up from gate_up [rows, 2 width]. */                                                          \
    void gate_##T(const T *restrict gate_up, T *restrict out, int64_t rows, int64_t width, int threads) {              \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t r = 0; r < rows; r++)                                                                             \
            for (int64_t d = 0; d < width; d++) {                                                                      \
                float gate = get(gate_up + r * 2 * width + d), up = get(gate_up + r * 2 * width + width + d);          \
                put(out + r * width + d, gate / (1 + expf(-gate)) * up);                                               \
            }                                                                                                          \
    }                                                                                                                  \
                                                                                                                       \
    /* The same again into out, and the gradient of gate_up. */                                                        \
    void gate_back_##T(const T *restrict gate_up, const T *restrict dout, T *restrict out, T *restrict dgate_up,       \
                       int64_t rows, int64_t width, int threads) {                                                     \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t r = 0; r < rows; r++)                                                                             \
            _Pragma("GCC ivdep") /* the two halves of a row do not overlap */                                          \
            for (int64_t d = 0; d < width; d++) {                                                                      \
                int64_t at = r * 2 * width + d;                                                                        \
                float gate = get(gate_up + at), up = get(gate_up + at + width), g = get(dout + r * width + d);         \
                float share = 1 / (1 + expf(-gate)), silu = gate * share;                                              \
                put(out + r * width + d, silu * up);                                                                   \
                put(dgate_up + at, g * up * (share + silu * (1 - share)));                                             \
                put(dgate_up + at + width, g * silu);                                                                  \
            }                                                                                                          \
    }

KERNELS(f32, get_f32, put_f32)
KERNELS(bf16, get_bf16, put_bf16)
