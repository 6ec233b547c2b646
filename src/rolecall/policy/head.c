/* The head on a chunk of raw logits [rows, vocab], each in few passes: logprobs.py holds the same maths in torch.
 *
 * Tempered logits are slope * raw. Sums over the vocabulary are float over blocks of 1,024 and double across blocks. Rows
 * are independent, so the same input gives the same bits whatever the number of threads.
 */
#include <math.h>

#include "storage.h"

#define BLOCK 1024

#define KERNELS(T, get, put)                                                                                           \
    /* Log-prob of each row's target, entropy and logsumexp of its tempered logits. */                                 \
    void score_##T(const T *restrict logits, const int64_t *restrict targets, float *restrict logprobs,                \
                   float *restrict entropy, float *restrict lse, int64_t rows, int64_t vocab, float slope, int threads) {\
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t r = 0; r < rows; r++) {                                                                           \
            const T *raw = logits + r * vocab;                                                                         \
            float top = -INFINITY;                                                                                     \
            for (int64_t i = 0; i < vocab; i++) {                                                                      \
                float z = get(raw + i) * slope;                                                                        \
                top = z > top ? z : top;                                                                               \
            }                                                                                                          \
            double total = 0, mean = 0;                                                                                \
            for (int64_t b = 0; b < vocab; b += BLOCK) {                                                               \
                int64_t end = b + BLOCK < vocab ? b + BLOCK : vocab;                                                   \
                float sum = 0, product = 0;                                                                            \
                for (int64_t i = b; i < end; i++) {                                                                    \
                    float above = get(raw + i) * slope - top, weight = expf(above);                                    \
                    sum += weight;                                                                                     \
                    product += weight * above;                                                                         \
                }                                                                                                      \
                total += sum;                                                                                          \
                mean += product;                                                                                       \
            }                                                                                                          \
            float size = (float)log(total);                                                                            \
            lse[r] = top + size;                                                                                       \
            logprobs[r] = get(raw + targets[r]) * slope - top - size;                                                  \
            entropy[r] = size - (float)(mean / total);                                                                 \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* The gradient of the raw logits, in their place: slope (g_logprob (1[target] - p) - g_entropy p (log p + H)). */ \
    void gradient_##T(T *restrict logits, const int64_t *restrict targets, const float *restrict lse,                  \
                      const float *restrict entropy, const float *restrict g_logprob, const float *restrict g_entropy, \
                      int64_t rows, int64_t vocab, float slope, int threads) {                                         \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t r = 0; r < rows; r++) {                                                                           \
            T *raw = logits + r * vocab;                                                                               \
            float shift = lse[r], h = entropy[r], gl = g_logprob[r] * slope, ge = g_entropy[r] * slope;                \
            float chosen = get(raw + targets[r]) * slope - shift;                                                      \
            for (int64_t i = 0; i < vocab; i++) {                                                                      \
                float logprob = get(raw + i) * slope - shift;                                                          \
                put(raw + i, -expf(logprob) * (gl + ge * (logprob + h)));                                              \
            }                                                                                                          \
            put(raw + targets[r], gl - expf(chosen) * (gl + ge * (chosen + h)));                                       \
        }                                                                                                              \
    }

KERNELS(f32, get_f32, put_f32)
KERNELS(bf16, get_bf16, put_bf16)
