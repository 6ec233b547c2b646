/* y = x W^T + b for few rows, with W packed once: llama.py holds the same maths in torch.
 *
 * A panel is COLUMNS of W's rows side by side, so that a vector holds one entry (bf16: two neighbours) of 16 of them. A
 * panel is read from memory once, while the one before it is still worked on, and serves all rows of x from the cache.
 * Sums run over the inner dimension in its order, so the same row gives the same bits whatever the other rows and the
 * threads are.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "storage.h"

#define LANES 16
#define VECTORS 3
#define COLUMNS (VECTORS * LANES)
#define ROWS 8 /* rows of x whose sums stay in registers */

#ifdef __AVX512F__
#include <immintrin.h>

static void in_large_pages(char *begin, int64_t bytes) { /* fewer page walks; may be refused */
#ifdef MADV_HUGEPAGE
    int64_t page = 4096, skip = -(uintptr_t)begin % page;
    if (bytes > skip) madvise(begin + skip, (bytes - skip) / page * page, MADV_HUGEPAGE);
#endif
}

/* STEP entries of the inner dimension go into one lane at a time; ADD(sum, weights, x) adds their product. */
#define STEP_f32 1
#define BROADCAST_f32(x) _mm512_set1_ps(*(x))
#define LOAD_f32(w) _mm512_loadu_ps(w)
#define ADD_f32(sum, x, w) _mm512_fmadd_ps(x, w, sum)
#define VECTOR_f32 __m512

#define STEP_bf16 2
#define BROADCAST_bf16(x) _mm512_set1_epi32(*(const int *)(x))
#define LOAD_bf16(w) _mm512_loadu_si512(w)
#define ADD_bf16(sum, x, w) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(w))
#define VECTOR_bf16 __m512i

#define LINEAR(T, get, put)                                                                                            \
    /* W [n, k] as panels; the columns beyond n are 0. */                                                              \
    void pack_##T(const T *restrict w, T *restrict packed, int64_t n, int64_t k, int threads) {                        \
        int64_t panels = (n + COLUMNS - 1) / COLUMNS;                                                                  \
        in_large_pages((char *)packed, panels * COLUMNS * k * sizeof(T));                                              \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t p = 0; p < panels; p++)                                                                           \
            for (int64_t i = 0; i < k / STEP_##T; i++)                                                                 \
                for (int64_t c = 0; c < COLUMNS; c++)                                                                  \
                    for (int64_t s = 0; s < STEP_##T; s++) {                                                           \
                        int64_t row = p * COLUMNS + c;                                                                 \
                        packed[((p * (k / STEP_##T) + i) * COLUMNS + c) * STEP_##T + s] =                              \
                            row < n ? w[row * k + i * STEP_##T + s] : 0;                                               \
                    }                                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    static inline __attribute__((always_inline)) void tile_##T(const int m, const T *x, const T *w, float *sums,       \
                                                               int64_t k, const char *ahead) {                         \
        __m512 found[ROWS][VECTORS];                                                                                   \
        for (int r = 0; r < m; r++)                                                                                    \
            for (int v = 0; v < VECTORS; v++) found[r][v] = _mm512_setzero_ps();                                       \
        for (int64_t i = 0; i < k; i += STEP_##T, w += COLUMNS * STEP_##T, ahead += 64) {                              \
            VECTOR_##T weights[VECTORS];                                                                               \
            for (int v = 0; v < VECTORS; v++) weights[v] = LOAD_##T(w + v * LANES * STEP_##T);                         \
            _mm_prefetch(ahead, _MM_HINT_T0);                                                                          \
            for (int r = 0; r < m; r++) {                                                                              \
                VECTOR_##T here = BROADCAST_##T(x + r * k + i);                                                        \
                for (int v = 0; v < VECTORS; v++) found[r][v] = ADD_##T(found[r][v], here, weights[v]);                \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < m; r++)                                                                                    \
            for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(sums + r * COLUMNS + v * LANES, found[r][v]);           \
    }                                                                                                                  \
                                                                                                                       \
    /* out [m, n] from x [m, k]; bias [n] or none. */                                                                  \
    void linear_##T(const T *restrict x, const T *restrict packed, const T *restrict bias, T *restrict out,            \
                    int64_t m, int64_t n, int64_t k, int threads) {                                                    \
        int64_t panels = (n + COLUMNS - 1) / COLUMNS;                                                                  \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (int64_t p = 0; p < panels; p++) {                                                                         \
            const T *w = packed + p * COLUMNS * k;                                                                     \
            const char *next = (const char *)(w + COLUMNS * k);                                                        \
            int64_t columns = n - p * COLUMNS < COLUMNS ? n - p * COLUMNS : COLUMNS;                                   \
            float sums[ROWS * COLUMNS];                                                                                \
            for (int64_t r = 0; r < m; r += ROWS) {                                                                    \
                int64_t rows = m - r < ROWS ? m - r : ROWS, pass = r / ROWS;                                           \
                const char *ahead = next + (pass < VECTORS ? pass * (k / STEP_##T) * 64 : 0);                          \
                switch (rows) {                                                                                        \
                case 8: tile_##T(8, x + r * k, w, sums, k, ahead); break;                                              \
                case 7: tile_##T(7, x + r * k, w, sums, k, ahead); break;                                              \
                case 6: tile_##T(6, x + r * k, w, sums, k, ahead); break;                                              \
                case 5: tile_##T(5, x + r * k, w, sums, k, ahead); break;                                              \
                case 4: tile_##T(4, x + r * k, w, sums, k, ahead); break;                                              \
                case 3: tile_##T(3, x + r * k, w, sums, k, ahead); break;                                              \
                case 2: tile_##T(2, x + r * k, w, sums, k, ahead); break;                                              \
                case 1: tile_##T(1, x + r * k, w, sums, k, ahead); break;                                              \
                }                                                                                                      \
                for (int64_t i = 0; i < rows; i++)                                                                     \
                    for (int64_t c = 0; c < columns; c++) {                                                            \
                        float added = bias ? get(bias + p * COLUMNS + c) : 0;                                          \
                        put(out + (r + i) * n + p * COLUMNS + c, sums[i * COLUMNS + c] + added);                       \
                    }                                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }

LINEAR(f32, get_f32, put_f32)
#ifdef __AVX512BF16__
LINEAR(bf16, get_bf16, put_bf16)
#endif
#endif
