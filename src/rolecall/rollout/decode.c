/* One decoding step's small pieces, each fused into one pass: what torch does in many calls over tiny tensors.
 *
 * Compiled at first use by policy/compiled.py for the machine it runs on; llama.py and sampler.py hold the same maths
 * in torch. Everything is computed in float, whatever the storage type. Work is split over rows and heads in a fixed
 * order, so the same input gives the same bits.
 */
#include <math.h>

#include "storage.h"

#define HEADS 4 /* queries that go over the keys together */

/* score [m, n] = q [m, width] keys^T, and sum [m, width] = score values; keys, values [n, width]. */
#define LOOK(T, get)                                                                                                   \
    static void plain_scores_##T(const float *q, const T *keys, int64_t n, int64_t m, int64_t width, float *score) {   \
        for (int64_t i = 0; i < m; i++)                                                                                \
            for (int64_t t = 0; t < n; t++) {                                                                          \
                float dot = 0;                                                                                         \
                for (int64_t d = 0; d < width; d++) dot += q[i * width + d] * get(keys + t * width + d);               \
                score[i * n + t] = dot;                                                                                \
            }                                                                                                          \
    }                                                                                                                  \
                                                                                                                       \
    static void plain_mix_##T(const float *score, const T *values, int64_t n, int64_t m, int64_t width, float *sum) {  \
        memset(sum, 0, m * width * sizeof(float));                                                                     \
        for (int64_t i = 0; i < m; i++)                                                                                \
            for (int64_t t = 0; t < n; t++)                                                                            \
                for (int64_t d = 0; d < width; d++)                                                                    \
                    sum[i * width + d] += score[i * n + t] * get(values + t * width + d);                              \
    }
LOOK(f32, get_f32)
LOOK(bf16, get_bf16)

#ifdef __AVX512F__
#include <immintrin.h>

static inline __m512 vector_f32(const f32 *p) { return _mm512_loadu_ps(p); }

static inline __m512 vector_bf16(const bf16 *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* The same with a key or value in registers: m and the number of its vectors are known to the compiler. What will be
 * read next is fetched meanwhile, from `ahead` on. */
#define REGISTERS(T)                                                                                                   \
    static inline __attribute__((always_inline)) void held_scores_##T(                                                 \
        const float *q, const T *keys, int64_t n, const int m, const int vectors, float *score, const T *ahead) {      \
        for (int64_t t = 0; t < n; t++) {                                                                              \
            __m512 key[8];                                                                                             \
            for (int v = 0; v < vectors; v++) key[v] = vector_##T(keys + (t * vectors + v) * 16);                      \
            for (int v = 0; v < vectors; v += 64 / (16 * sizeof(T)))                                                   \
                _mm_prefetch((const char *)(ahead + (t * vectors + v) * 16), _MM_HINT_T0);                             \
            for (int i = 0; i < m; i++) {                                                                              \
                __m512 dot = _mm512_mul_ps(_mm512_loadu_ps(q + i * vectors * 16), key[0]);                             \
                for (int v = 1; v < vectors; v++)                                                                      \
                    dot = _mm512_fmadd_ps(_mm512_loadu_ps(q + (i * vectors + v) * 16), key[v], dot);                   \
                score[i * n + t] = _mm512_reduce_add_ps(dot);                                                          \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static inline __attribute__((always_inline)) void held_mix_##T(                                                    \
        const float *score, const T *values, int64_t n, const int m, const int vectors, float *sum, const T *ahead) {  \
        __m512 sums[HEADS][8];                                                                                         \
        for (int i = 0; i < m; i++)                                                                                    \
            for (int v = 0; v < vectors; v++) sums[i][v] = _mm512_setzero_ps();                                        \
        for (int64_t t = 0; t < n; t++)                                                                                \
            for (int v = 0; v < vectors; v++) {                                                                        \
                if (v % (64 / (16 * sizeof(T))) == 0)                                                                  \
                    _mm_prefetch((const char *)(ahead + (t * vectors + v) * 16), _MM_HINT_T0);                         \
                __m512 value = vector_##T(values + (t * vectors + v) * 16);                                            \
                for (int i = 0; i < m; i++)                                                                            \
                    sums[i][v] = _mm512_fmadd_ps(_mm512_set1_ps(score[i * n + t]), value, sums[i][v]);                 \
            }                                                                                                          \
        for (int i = 0; i < m; i++)                                                                                    \
            for (int v = 0; v < vectors; v++) _mm512_storeu_ps(sum + (i * vectors + v) * 16, sums[i][v]);              \
    }                                                                                                                  \
                                                                                                                       \
    static void scores_##T(const float *q, const T *keys, int64_t n, int64_t m, int64_t width, float *score,           \
                           const T *ahead) {                                                                           \
        SIZES(held_scores_##T, plain_scores_##T, q, keys, score)                                                       \
    }                                                                                                                  \
                                                                                                                       \
    static void mix_##T(const float *score, const T *values, int64_t n, int64_t m, int64_t width, float *sum,          \
                        const T *ahead) {                                                                              \
        SIZES(held_mix_##T, plain_mix_##T, score, values, sum)                                                         \
    }

#define SIZES(held, plain, a, b, c)                                                                                    \
    switch (m * 1000 + width) {                                                                                        \
    case 1032: held(a, b, n, 1, 2, c, ahead); break;                                                                   \
    case 2032: held(a, b, n, 2, 2, c, ahead); break;                                                                   \
    case 3032: held(a, b, n, 3, 2, c, ahead); break;                                                                   \
    case 4032: held(a, b, n, 4, 2, c, ahead); break;                                                                   \
    case 1064: held(a, b, n, 1, 4, c, ahead); break;                                                                   \
    case 2064: held(a, b, n, 2, 4, c, ahead); break;                                                                   \
    case 3064: held(a, b, n, 3, 4, c, ahead); break;                                                                   \
    case 4064: held(a, b, n, 4, 4, c, ahead); break;                                                                   \
    case 1128: held(a, b, n, 1, 8, c, ahead); break;                                                                   \
    case 2128: held(a, b, n, 2, 8, c, ahead); break;                                                                   \
    case 3128: held(a, b, n, 3, 8, c, ahead); break;                                                                   \
    case 4128: held(a, b, n, 4, 8, c, ahead); break;                                                                   \
    default: plain(a, b, n, m, width, c);                                                                              \
    }
REGISTERS(f32)
REGISTERS(bf16)
#else
#define scores_f32(q, keys, n, m, width, score, ahead) plain_scores_f32(q, keys, n, m, width, score)
#define scores_bf16(q, keys, n, m, width, score, ahead) plain_scores_bf16(q, keys, n, m, width, score)
#define mix_f32(score, values, n, m, width, sum, ahead) plain_mix_f32(score, values, n, m, width, sum)
#define mix_bf16(score, values, n, m, width, sum, ahead) plain_mix_bf16(score, values, n, m, width, sum)
#endif

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
                float q[HEADS * width], score[HEADS * n], sum[HEADS * width];                                          \
                for (int64_t g = 0; g < group; g += HEADS) {                                                           \
                    int64_t m = group - g < HEADS ? group - g : HEADS;                                                 \
                    for (int64_t i = 0; i < m; i++) {                                                                  \
                        const T *query = row + (h * group + g + i) * width;                                            \
                        for (int64_t d = 0; d < half; d++) {                                                           \
                            float a = get(query + d), b = get(query + half + d);                                       \
                            q[i * width + d] = (a * c[d] - b * s[d]) * scale;                                          \
                            q[i * width + half + d] = (b * c[d] + a * s[d]) * scale;                                   \
                        }                                                                                              \
                    }                                                                                                  \
                    scores_##T(q, k, n, m, width, score, v);                                                           \
                    for (int64_t i = 0; i < m; i++) {                                                                  \
                        float *mine = score + i * n, top = -INFINITY, total = 0;                                       \
                        for (int64_t t = 0; t < n; t++) top = mine[t] > top ? mine[t] : top;                           \
                        for (int64_t t = 0; t < n; t++) mine[t] = expf(mine[t] - top);                                 \
                        for (int64_t t = 0; t < n; t++) total += mine[t];                                              \
                        for (int64_t t = 0; t < n; t++) mine[t] *= 1 / total;                                          \
                    }                                                                                                  \
                    mix_##T(score, v, n, m, width, sum, k + room * width);                                             \
                    T *result = out + (r * heads + h * group + g) * width;                                             \
                    for (int64_t d = 0; d < m * width; d++) put(result + d, sum[d]);                                   \
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
