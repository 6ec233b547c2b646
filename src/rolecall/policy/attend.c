/* Attention on flat tokens, forward and backward: attend_ops.py holds the same maths in torch.
 *
 * Tokens lie in segments, segments in groups. The first segment of a group is its prefix, which may be empty; a token
 * looks at its group's prefix and at its own segment up to itself. qkv [n, (heads + 2 kv_heads) width] holds queries,
 * keys and values side by side; out [n, heads width]; logsums [n, heads].
 *
 * One thread does one group's share of one key head, so nothing is shared, and the same input gives the same bits
 * whatever the number of threads. Everything is computed in float, or in bfloat16 with sums in float.
 */
#include <math.h>
#include <stdlib.h>

#include "storage.h"

#define ROWS 6           /* rows of a product that stay in registers */
#define BLOCK (4 * ROWS) /* queries that are worked on together */
#ifdef __AVX512F__
#define LANES 16
#define VECTORS 4
#else
#define LANES 8
#define VECTORS 2
#endif
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));

/* ROWS rows and `v` vectors of c (+)= a b: a(i, k) = a[i * rs + k * cs], b [inner, ldb], c [ROWS, ldc]. */
static inline __attribute__((always_inline)) void tile(const int v, const float *restrict a, int64_t rs, int64_t cs,
                                                       const float *restrict b, int64_t ldb, float *restrict c,
                                                       int64_t ldc, int64_t inner, int add) {
    vector sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < v; j++) sums[i][j] = add ? *(vector *)(c + i * ldc + j * LANES) : (vector){0};
    for (int64_t k = 0; k < inner; k++)
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < v; j++) sums[i][j] += a[i * rs + k * cs] * *(const vector *)(b + k * ldb + j * LANES);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < v; j++) *(vector *)(c + i * ldc + j * LANES) = sums[i][j];
}

/* c [rows, columns] (+)= a b, with rows a multiple of ROWS and columns one of LANES. */
#define PRODUCT(name, tile, T)                                                                                         \
    static void name(const T *restrict a, int64_t rs, int64_t cs, const T *restrict b, int64_t ldb, float *restrict c, \
                     int64_t ldc, int64_t rows, int64_t columns, int64_t inner, int add) {                             \
        for (int64_t j = 0; j < columns;) {                                                                            \
            int64_t left = (columns - j) / LANES, v = left >= VECTORS ? VECTORS : left >= 2 ? 2 : 1;                   \
            for (int64_t i = 0; i < rows; i += ROWS) {                                                                 \
                const T *from = a + i * rs, *right = b + j;                                                            \
                float *to = c + i * ldc + j;                                                                           \
                if (v == VECTORS) tile(VECTORS, from, rs, cs, right, ldb, to, ldc, inner, add);                        \
                else if (v == 2) tile(2, from, rs, cs, right, ldb, to, ldc, inner, add);                               \
                else tile(1, from, rs, cs, right, ldb, to, ldc, inner, add);                                           \
            }                                                                                                          \
            j += v * LANES;                                                                                            \
        }                                                                                                              \
    }
PRODUCT(product, tile, float)

static int64_t up_to(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

static int64_t longest(const int64_t *segments, int64_t first, int64_t last) {
    int64_t most = 0;
    for (int64_t s = first; s < last; s++)
        if (segments[s + 1] - segments[s] > most) most = segments[s + 1] - segments[s];
    return most;
}

#define ATTENTION(T, get, put)                                                                                         \
    static void rows_##T(const T *from, int64_t stride, int64_t count, int64_t width, float scale, float *to,          \
                         int64_t ld) { /* [count, width] */                                                            \
        for (int64_t t = 0; t < count; t++)                                                                            \
            for (int64_t d = 0; d < width; d++) to[t * ld + d] = scale * get(from + t * stride + d);                   \
    }                                                                                                                  \
                                                                                                                       \
    static void columns_##T(const T *from, int64_t stride, int64_t count, int64_t width, float *to, int64_t ld) {      \
        for (int64_t t = 0; t < count; t++) /* [width, count] */                                                       \
            for (int64_t d = 0; d < width; d++) to[d * ld + t] = get(from + t * stride + d);                           \
    }                                                                                                                  \
                                                                                                                       \
    void attend_##T(const T *qkv, T *out, float *logsums, const int64_t *segments, const int64_t *groups,              \
                    int64_t count, int64_t heads, int64_t kv_heads, int64_t width, float scale, int threads) {         \
        int64_t stride = (heads + 2 * kv_heads) * width, ratio = heads / kv_heads, wide = up_to(width, LANES);         \
        _Pragma("omp parallel for collapse(2) schedule(dynamic) num_threads(threads)")                                 \
        for (int64_t g = 0; g < count; g++)                                                                            \
            for (int64_t h = 0; h < kv_heads; h++) {                                                                   \
                int64_t first = groups[g], last = groups[g + 1], prefix = segments[first + 1] - segments[first];       \
                int64_t room = up_to(prefix + longest(segments, first, last) + ROWS, LANES);                           \
                float *memory = calloc(room * (width + wide) + BLOCK * (room + 2 * wide), sizeof(float));              \
                float *keys = memory, *values = keys + width * room, *scores = values + room * wide;                   \
                float *q = scores + BLOCK * room, *sums = q + BLOCK * wide;                                            \
                for (int64_t s = first; s < last; s++) {                                                               \
                    int64_t begin = segments[s], length = segments[s + 1] - begin, base = s == first ? 0 : prefix;     \
                    const T *own = qkv + begin * stride + (heads + h) * width;                                         \
                    columns_##T(own, stride, length, width, keys + base, room);                                        \
                    rows_##T(own + kv_heads * width, stride, length, width, 1, values + base * wide, wide);            \
                    for (int64_t head = h * ratio; head < (h + 1) * ratio; head++)                                     \
                        for (int64_t at = 0; at < length; at += BLOCK) {                                               \
                            int64_t here = length - at < BLOCK ? length - at : BLOCK, seen = base + at + here;         \
                            int64_t rows = up_to(here, ROWS), columns = up_to(seen, LANES);                            \
                            rows_##T(qkv + (begin + at) * stride + head * width, stride, here, width, scale, q, wide); \
                            product(q, wide, 1, keys, room, scores, room, rows, columns, width, 0);                    \
                            for (int64_t i = 0; i < here; i++) {                                                       \
                                float *row = scores + i * room, most = row[0], sum = 0;                                \
                                for (int64_t k = base + at + i + 1; k < columns; k++) row[k] = -INFINITY;              \
                                for (int64_t k = 1; k < columns; k++) most = row[k] > most ? row[k] : most;            \
                                for (int64_t k = 0; k < columns; k++) row[k] = expf(row[k] - most);                    \
                                for (int64_t k = 0; k < columns; k++) sum += row[k];                                   \
                                for (int64_t k = 0; k < columns; k++) row[k] *= 1 / sum;                               \
                                logsums[(begin + at + i) * heads + head] = most + logf(sum);                           \
                            }                                                                                          \
                            product(scores, room, 1, values, wide, sums, wide, rows, wide, seen, 0);                   \
                            for (int64_t i = 0; i < here; i++)                                                         \
                                for (int64_t d = 0; d < width; d++)                                                    \
                                    put(out + ((begin + at + i) * heads + head) * width + d, sums[i * wide + d]);      \
                        }                                                                                              \
                }                                                                                                      \
                free(memory);                                                                                          \
            }                                                                                                          \
    }                                                                                                                  \
                                                                                                                       \
    /* dqkv from dout, with logsums as the forward made them. */                                                       \
    void attend_back_##T(const T *qkv, const float *logsums, const T *dout, T *dqkv, const int64_t *segments,          \
                         const int64_t *groups, int64_t count, int64_t heads, int64_t kv_heads, int64_t width,         \
                         float scale, int threads) {                                                                   \
        int64_t stride = (heads + 2 * kv_heads) * width, ratio = heads / kv_heads, wide = up_to(width, LANES);         \
        _Pragma("omp parallel for collapse(2) schedule(dynamic) num_threads(threads)")                                 \
        for (int64_t g = 0; g < count; g++)                                                                            \
            for (int64_t h = 0; h < kv_heads; h++) {                                                                   \
                int64_t first = groups[g], last = groups[g + 1], prefix = segments[first + 1] - segments[first];       \
                int64_t room = up_to(prefix + longest(segments, first, last) + ROWS, LANES);                           \
                float *memory =                                                                                        \
                    calloc(room * (2 * width + 3 * wide) + BLOCK * (2 * room + 3 * wide), sizeof(float));              \
                float *keys = memory, *values = keys + width * room, *key_rows = values + width * room;                \
                float *dkeys = key_rows + room * wide, *dvalues = dkeys + room * wide;                                 \
                float *scores = dvalues + room * wide, *dscores = scores + BLOCK * room;                               \
                float *q = dscores + BLOCK * room, *up = q + BLOCK * wide, *dq = up + BLOCK * wide;                    \
                for (int64_t s = first; s < last; s++) {                                                               \
                    int64_t begin = segments[s], length = segments[s + 1] - begin, base = s == first ? 0 : prefix;     \
                    const T *own = qkv + begin * stride + (heads + h) * width;                                         \
                    columns_##T(own, stride, length, width, keys + base, room);                                        \
                    rows_##T(own, stride, length, width, 1, key_rows + base * wide, wide);                             \
                    columns_##T(own + kv_heads * width, stride, length, width, values + base, room);                   \
                    memset(dkeys + base * wide, 0, length * wide * sizeof(float));                                     \
                    memset(dvalues + base * wide, 0, length * wide * sizeof(float));                                   \
                    for (int64_t head = h * ratio; head < (h + 1) * ratio; head++)                                     \
                        for (int64_t at = 0; at < length; at += BLOCK) {                                               \
                            int64_t here = length - at < BLOCK ? length - at : BLOCK, seen = base + at + here;         \
                            int64_t rows = up_to(here, ROWS), columns = up_to(seen, LANES), beyond = up_to(seen, ROWS);\
                            rows_##T(qkv + (begin + at) * stride + head * width, stride, here, width, scale, q, wide); \
                            rows_##T(dout + ((begin + at) * heads + head) * width, heads * width, here, width, 1, up,  \
                                     wide);                                                                            \
                            product(q, wide, 1, keys, room, scores, room, rows, columns, width, 0);                    \
                            product(up, wide, 1, values, room, dscores, room, rows, columns, width, 0);                \
                            for (int64_t i = 0; i < here; i++) {                                                       \
                                float *row = scores + i * room, *drow = dscores + i * room, both = 0;                  \
                                float logsum = logsums[(begin + at + i) * heads + head];                               \
                                for (int64_t k = base + at + i + 1; k < columns; k++) row[k] = -INFINITY;              \
                                for (int64_t k = 0; k < columns; k++) row[k] = expf(row[k] - logsum);                  \
                                for (int64_t k = 0; k < columns; k++) both += row[k] * drow[k];                        \
                                for (int64_t k = 0; k < columns; k++) drow[k] = row[k] * (drow[k] - both);             \
                                for (int64_t k = columns; k < beyond; k++) row[k] = drow[k] = 0;                       \
                            }                                                                                          \
                            product(scores, 1, room, up, wide, dvalues, wide, beyond, wide, here, 1);                  \
                            product(dscores, 1, room, q, wide, dkeys, wide, beyond, wide, here, 1);                    \
                            product(dscores, room, 1, key_rows, wide, dq, wide, rows, wide, seen, 0);                  \
                            for (int64_t i = 0; i < here; i++)                                                         \
                                for (int64_t d = 0; d < width; d++)                                                    \
                                    put(dqkv + (begin + at + i) * stride + head * width + d, scale * dq[i * wide + d]);\
                        }                                                                                              \
                    if (s > first) {                                                                                   \
                        back_##T(dqkv, dkeys + base * wide, begin, length, stride, (heads + h) * width, width, wide);  \
                        back_##T(dqkv, dvalues + base * wide, begin, length, stride, (heads + kv_heads + h) * width,   \
                                 width, wide);                                                                         \
                    }                                                                                                  \
                }                                                                                                      \
                back_##T(dqkv, dkeys, segments[first], prefix, stride, (heads + h) * width, width, wide);              \
                back_##T(dqkv, dvalues, segments[first], prefix, stride, (heads + kv_heads + h) * width, width, wide); \
                free(memory);                                                                                          \
            }                                                                                                          \
    }

#define BACK(T, put)                                                                                                   \
    static void back_##T(T *to, const float *from, int64_t begin, int64_t count, int64_t stride, int64_t offset,       \
                         int64_t width, int64_t ld) {                                                                  \
        for (int64_t t = 0; t < count; t++)                                                                            \
            for (int64_t d = 0; d < width; d++) put(to + (begin + t) * stride + offset + d, from[t * ld + d]);         \
    }

BACK(f32, put_f32)
BACK(bf16, put_bf16)
ATTENTION(f32, get_f32, put_f32)

#ifdef __AVX512BF16__
#include <immintrin.h>

/* The same with the processor's dot product of pairs of bfloat16: inputs, probabilities and their gradients are bfloat16,
 * sums are float. A word of 32 bits is a pair along the axis that is summed over. */
typedef uint32_t pair;

static inline __attribute__((always_inline)) void pair_tile(const int v, const pair *restrict a, int64_t rs, int64_t cs,
                                                            const pair *restrict b, int64_t ldb, float *restrict c,
                                                            int64_t ldc, int64_t inner, int add) {
    __m512 sums[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < v; j++) sums[i][j] = add ? _mm512_loadu_ps(c + i * ldc + j * LANES) : _mm512_setzero_ps();
    for (int64_t k = 0; k < inner; k++) {
        __m512bh right[VECTORS];
        for (int j = 0; j < v; j++) right[j] = (__m512bh)_mm512_loadu_si512(b + k * ldb + j * LANES);
        for (int i = 0; i < ROWS; i++) {
            __m512bh left = (__m512bh)_mm512_set1_epi32((int)a[i * rs + k * cs]);
            for (int j = 0; j < v; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], left, right[j]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < v; j++) _mm512_storeu_ps(c + i * ldc + j * LANES, sums[i][j]);
}

PRODUCT(pair_product, pair_tile, pair)

/* [width / 2, ld] pairs along the width; a column per token. */
static void pair_columns(const bf16 *from, int64_t stride, int64_t count, int64_t width, pair *to, int64_t ld) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t d = 0; d < width / 2; d++) memcpy(to + d * ld + t, from + t * stride + 2 * d, sizeof(pair));
}

/* [., ld] pairs along the tokens, of which the first is number `at`; zeros make the last pair whole. */
static void pair_rows(const bf16 *from, int64_t stride, int64_t count, int64_t width, pair *to, int64_t ld, int64_t at) {
    for (int64_t t = 0; t < count || (at + t) % 2;) {
        pair *row = to + (at + t) / 2 * ld;
        if ((at + t) % 2 || t + 1 >= count) { /* half a pair */
            int shift = (at + t) % 2 * 16;
            for (int64_t d = 0; d < width; d++)
                row[d] = (shift ? row[d] & 0xffff : 0) | (t < count ? (pair)from[t * stride + d] << shift : 0);
            t++;
        } else {
            const bf16 *low = from + t * stride, *high = low + stride;
            for (int64_t d = 0; d < width; d++) row[d] = low[d] | (pair)high[d] << 16;
            t += 2;
        }
    }
}

/* The two halves of a vector element by element: (a0, b0), (a1, b1), ... */
static inline __m512i zipped(__m512bh halves) {
    __m512i both = (__m512i)halves;
    __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both));
    __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

static void to_bf16(const float *from, bf16 *to, int64_t count) { /* a multiple of LANES */
    for (int64_t k = 0; k < count; k += LANES)
        _mm256_storeu_si256((__m256i *)(to + k), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + k)));
}

void attend_bf16(const bf16 *qkv, bf16 *out, float *logsums, const int64_t *segments, const int64_t *groups,
                 int64_t count, int64_t heads, int64_t kv_heads, int64_t width, float scale, int threads) {
    int64_t stride = (heads + 2 * kv_heads) * width, ratio = heads / kv_heads, wide = up_to(width, LANES);
    _Pragma("omp parallel for collapse(2) schedule(dynamic) num_threads(threads)")
    for (int64_t g = 0; g < count; g++)
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t first = groups[g], last = groups[g + 1], prefix = segments[first + 1] - segments[first];
            int64_t room = up_to(prefix + longest(segments, first, last) + ROWS, 2 * LANES);
            float *memory = calloc(room * (width + wide) / 2 + BLOCK * (room + room / 2 + wide + width / 2), sizeof(float));
            float *scores = memory, *sums = scores + BLOCK * room;
            pair *keys = (pair *)(sums + BLOCK * wide), *values = keys + width / 2 * room;
            pair *shares = values + room / 2 * wide, *q = shares + BLOCK * room / 2;
            for (int64_t s = first; s < last; s++) {
                int64_t begin = segments[s], length = segments[s + 1] - begin, base = s == first ? 0 : prefix;
                const bf16 *own = qkv + begin * stride + (heads + h) * width;
                pair_columns(own, stride, length, width, keys + base, room);
                pair_rows(own + kv_heads * width, stride, length, width, values, wide, base);
                for (int64_t head = h * ratio; head < (h + 1) * ratio; head++)
                    for (int64_t at = 0; at < length; at += BLOCK) {
                        int64_t here = length - at < BLOCK ? length - at : BLOCK, seen = base + at + here;
                        int64_t rows = up_to(here, ROWS), columns = up_to(seen, LANES);
                        const bf16 *from = qkv + (begin + at) * stride + head * width;
                        for (int64_t i = 0; i < here; i++)
                            memcpy(q + i * width / 2, from + i * stride, width * sizeof(bf16));
                        pair_product(q, width / 2, 1, keys, room, scores, room, rows, columns, width / 2, 0);
                        for (int64_t i = 0; i < here; i++) {
                            float *row = scores + i * room, most = row[0], sum = 0;
                            for (int64_t k = base + at + i + 1; k < columns; k++) row[k] = -INFINITY;
                            for (int64_t k = 1; k < columns; k++) most = row[k] > most ? row[k] : most;
                            for (int64_t k = 0; k < columns; k++) row[k] = expf(scale * (row[k] - most));
                            for (int64_t k = 0; k < columns; k++) sum += row[k];
                            for (int64_t k = 0; k < columns; k++) row[k] *= 1 / sum;
                            logsums[(begin + at + i) * heads + head] = scale * most + logf(sum);
                            to_bf16(row, (bf16 *)(shares + i * room / 2), columns);
                        }
                        pair_product(shares, room / 2, 1, values, wide, sums, wide, rows, wide, (seen + 1) / 2, 0);
                        for (int64_t i = 0; i < here; i++)
                            for (int64_t d = 0; d < width; d++)
                                put_bf16(out + ((begin + at + i) * heads + head) * width + d, sums[i * wide + d]);
                    }
            }
            free(memory);
        }
}

void attend_back_bf16(const bf16 *qkv, const float *logsums, const bf16 *dout, bf16 *dqkv, const int64_t *segments,
                      const int64_t *groups, int64_t count, int64_t heads, int64_t kv_heads, int64_t width, float scale,
                      int threads) {
    int64_t stride = (heads + 2 * kv_heads) * width, ratio = heads / kv_heads, wide = up_to(width, LANES);
    _Pragma("omp parallel for collapse(2) schedule(dynamic) num_threads(threads)")
    for (int64_t g = 0; g < count; g++)
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t first = groups[g], last = groups[g + 1], prefix = segments[first + 1] - segments[first];
            int64_t room = up_to(prefix + longest(segments, first, last) + ROWS, 2 * LANES);
            float *memory = calloc(room * (width + wide / 2 + 2 * wide) + BLOCK * (3 * room + room / 2 + 2 * wide + width),
                                   sizeof(float));
            float *dkeys = memory, *dvalues = dkeys + room * wide, *scores = dvalues + room * wide;
            float *dscores = scores + BLOCK * room, *dq = dscores + BLOCK * room;
            pair *keys = (pair *)(dq + BLOCK * wide), *values = keys + width / 2 * room;
            pair *key_rows = values + width / 2 * room, *q = key_rows + room / 2 * wide, *up = q + BLOCK * width / 2;
            pair *q_rows = up + BLOCK * width / 2, *up_rows = q_rows + BLOCK / 2 * wide;
            pair *shares = up_rows + BLOCK / 2 * wide, *slopes = shares + BLOCK / 2 * room;
            pair *slope_rows = slopes + BLOCK / 2 * room;
            for (int64_t s = first; s < last; s++) {
                int64_t begin = segments[s], length = segments[s + 1] - begin, base = s == first ? 0 : prefix;
                const bf16 *own = qkv + begin * stride + (heads + h) * width;
                pair_columns(own, stride, length, width, keys + base, room);
                pair_rows(own, stride, length, width, key_rows, wide, base);
                pair_columns(own + kv_heads * width, stride, length, width, values + base, room);
                memset(dkeys + base * wide, 0, length * wide * sizeof(float));
                memset(dvalues + base * wide, 0, length * wide * sizeof(float));
                for (int64_t head = h * ratio; head < (h + 1) * ratio; head++)
                    for (int64_t at = 0; at < length; at += BLOCK) {
                        int64_t here = length - at < BLOCK ? length - at : BLOCK, seen = base + at + here;
                        int64_t rows = up_to(here, ROWS), columns = up_to(seen, LANES), beyond = up_to(seen, ROWS);
                        const bf16 *from = qkv + (begin + at) * stride + head * width;
                        const bf16 *above = dout + ((begin + at) * heads + head) * width;
                        for (int64_t i = 0; i < here; i++) {
                            memcpy(q + i * width / 2, from + i * stride, width * sizeof(bf16));
                            memcpy(up + i * width / 2, above + i * heads * width, width * sizeof(bf16));
                        }
                        pair_rows(from, stride, here, width, q_rows, wide, 0);
                        pair_rows(above, heads * width, here, width, up_rows, wide, 0);
                        pair_product(q, width / 2, 1, keys, room, scores, room, rows, columns, width / 2, 0);
                        pair_product(up, width / 2, 1, values, room, dscores, room, rows, columns, width / 2, 0);
                        for (int64_t i = 0; i < here; i++) {
                            float *row = scores + i * room, *drow = dscores + i * room, both = 0;
                            float logsum = logsums[(begin + at + i) * heads + head];
                            for (int64_t k = base + at + i + 1; k < columns; k++) row[k] = -INFINITY;
                            for (int64_t k = 0; k < columns; k++) row[k] = expf(scale * row[k] - logsum);
                            for (int64_t k = 0; k < columns; k++) both += row[k] * drow[k];
                            for (int64_t k = 0; k < columns; k++) drow[k] = scale * row[k] * (drow[k] - both);
                            to_bf16(drow, (bf16 *)(slope_rows + i * room / 2), columns);
                        }
                        if (here % 2) { /* the other half of the last pair */
                            memset(scores + here * room, 0, columns * sizeof(float));
                            memset(dscores + here * room, 0, columns * sizeof(float));
                        }
                        for (int64_t i = 0; i < (here + 1) / 2; i++) {
                            for (int64_t k = 0; k < columns; k += LANES) {
                                const float *row = scores + 2 * i * room + k, *drow = dscores + 2 * i * room + k;
                                __m512bh share = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + room), _mm512_loadu_ps(row));
                                __m512bh slope = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(drow + room), _mm512_loadu_ps(drow));
                                _mm512_storeu_si512(shares + i * room + k, zipped(share));
                                _mm512_storeu_si512(slopes + i * room + k, zipped(slope));
                            }
                            for (int64_t k = columns; k < beyond; k++) shares[i * room + k] = slopes[i * room + k] = 0;
                        }
                        pair_product(shares, 1, room, up_rows, wide, dvalues, wide, beyond, wide, (here + 1) / 2, 1);
                        pair_product(slopes, 1, room, q_rows, wide, dkeys, wide, beyond, wide, (here + 1) / 2, 1);
                        pair_product(slope_rows, room / 2, 1, key_rows, wide, dq, wide, rows, wide, (seen + 1) / 2, 0);
                        for (int64_t i = 0; i < here; i++)
                            for (int64_t d = 0; d < width; d++)
                                put_bf16(dqkv + (begin + at + i) * stride + head * width + d, dq[i * wide + d]);
                    }
                if (s > first) {
                    back_bf16(dqkv, dkeys + base * wide, begin, length, stride, (heads + h) * width, width, wide);
                    back_bf16(dqkv, dvalues + base * wide, begin, length, stride, (heads + kv_heads + h) * width, width,
                              wide);
                }
            }
            back_bf16(dqkv, dkeys, segments[first], prefix, stride, (heads + h) * width, width, wide);
            back_bf16(dqkv, dvalues, segments[first], prefix, stride, (heads + kv_heads + h) * width, width, wide);
            free(memory);
        }
}
#else
ATTENTION(bf16, get_bf16, put_bf16)
#endif
