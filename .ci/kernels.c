/* Runs every function of one of the package's C files on made-up numbers and writes what it gives, as floats.
 *
 * Compiled with -DFILE_<name> and -include <name>.c: functions of different files have the same names. The numbers are the
 * same wherever it runs, so what it writes for one processor can be compared with what it writes for another.
 */
#include <stdio.h>
#include <stdlib.h>

#include "storage.h"

#define ROWS_IN 5
#define THREADS 2

static uint64_t state = 1;

static float number(void) { /* in -2 .. 2, exact in bfloat16 */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int64_t)(state >> 57) - 64) / 32;
}

#define TOOLS(T, get, put)                                                                                             \
    static T *made_##T(int64_t count) {                                                                                \
        T *x = malloc(count * sizeof(T));                                                                              \
        for (int64_t i = 0; i < count; i++) put(x + i, number());                                                      \
        return x;                                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    static void show_##T(const char *name, const T *x, int64_t count) {                                                \
        printf("%s_" #T, name);                                                                                        \
        for (int64_t i = 0; i < count; i++) printf(" %.9g", get(x + i));                                               \
        printf("\n");                                                                                                  \
    }
TOOLS(f32, get_f32, put_f32)
TOOLS(bf16, get_bf16, put_bf16)

#define HEAD(T)                                                                                                        \
    {                                                                                                                  \
        int64_t vocab = 1500, targets[] = {0, 7, 1499, 1024, 512};                                                     \
        float logprobs[ROWS_IN], entropy[ROWS_IN], lse[ROWS_IN], *g = made_f32(ROWS_IN), *ge = made_f32(ROWS_IN);      \
        T *logits = made_##T(ROWS_IN * vocab);                                                                         \
        score_##T(logits, targets, logprobs, entropy, lse, ROWS_IN, vocab, 1.25f, THREADS);                            \
        gradient_##T(logits, targets, lse, entropy, g, ge, ROWS_IN, vocab, 1.25f, THREADS);                            \
        show_f32("logprobs_" #T, logprobs, ROWS_IN);                                                                   \
        show_f32("entropy_" #T, entropy, ROWS_IN);                                                                     \
        show_f32("lse_" #T, lse, ROWS_IN);                                                                             \
        show_##T("gradient", logits, ROWS_IN * vocab);                                                                 \
    }

#define FLAT(T)                                                                                                        \
    {                                                                                                                  \
        int64_t rows = 70, width = 37, heads = 3, half = 5, stride = 40, n = rows * width;                             \
        float *before = made_f32(n), *weight = made_f32(width), *above = made_f32(n), *x = made_f32(n);                \
        float *dx = made_f32(n), *partial = made_f32(2 * width), factors[70];                                          \
        float *cos = made_f32(rows * half), *sin = made_f32(rows * half);                                              \
        T *added = made_##T(n), *dout = made_##T(n), *out = made_##T(n), *dadded = made_##T(n);                        \
        T *qkv = made_##T(rows * stride), *gate_up = made_##T(2 * n), *dgate_up = made_##T(2 * n);                     \
        norm_##T(before, added, weight, x, out, factors, rows, width, 1e-5f, THREADS);                                 \
        show_f32("x_" #T, x, n);                                                                                       \
        show_##T("norm", out, n);                                                                                      \
        norm_back_##T(x, weight, factors, dout, above, dx, dadded, partial, rows, width, THREADS);                     \
        show_f32("dx_" #T, dx, n);                                                                                     \
        show_##T("dadded", dadded, n);                                                                                 \
        show_f32("partial_" #T, partial, 2 * width);                                                                   \
        norm_##T(before, NULL, weight, x, out, factors, rows, width, 1e-5f, THREADS);                                  \
        show_##T("norm_alone", out, n);                                                                                \
        norm_back_##T(before, weight, factors, dout, NULL, dx, NULL, partial, rows, width, THREADS);                   \
        show_f32("dx_alone_" #T, dx, n);                                                                               \
        rotate_##T(qkv, cos, sin, rows, stride, heads, half, 1, THREADS);                                              \
        show_##T("rotate", qkv, rows * stride);                                                                        \
        rotate_##T(qkv, cos, sin, rows, stride, heads, half, -1, THREADS);                                             \
        show_##T("rotate_back", qkv, rows * stride);                                                                   \
        gate_##T(gate_up, out, rows, width, THREADS);                                                                  \
        show_##T("gate", out, n);                                                                                      \
        gate_back_##T(gate_up, dout, out, dgate_up, rows, width, THREADS);                                             \
        show_##T("gate_again", out, n);                                                                                \
        show_##T("gate_back", dgate_up, 2 * n);                                                                        \
    }

#define ATTEND(T)                                                                                                      \
    for (int64_t width = 8; width <= 36; width += 14) { /* a prefix of 9 with branches of 4 and 33; no prefix and 20 */\
        int64_t starts[] = {0, 9, 13, 46, 46, 66}, groups[] = {0, 3, 5}, heads = 4, kv = 2, tokens = 66;               \
        int64_t size = tokens * (heads + 2 * kv) * width;                                                              \
        T *qkv = made_##T(size), *out = made_##T(tokens * heads * width), *dout = made_##T(tokens * heads * width);    \
        T *dqkv = made_##T(size);                                                                                      \
        float *logsums = made_f32(tokens * heads);                                                                     \
        attend_##T(qkv, out, logsums, starts, groups, 2, heads, kv, width, 0.2f, THREADS);                             \
        show_##T("attend", out, tokens * heads * width);                                                               \
        show_f32("logsums_" #T, logsums, tokens * heads);                                                              \
        attend_back_##T(qkv, logsums, dout, dqkv, starts, groups, 2, heads, kv, width, 0.2f, THREADS);                 \
        show_##T("attend_back", dqkv, size);                                                                           \
    }

#define DECODE(T)                                                                                                      \
    for (int64_t width = 24; width <= 64; width += 8) { /* 32 and 64 have code of their own */                         \
        int64_t lengths[] = {0, 3, 16, 31, 39}, heads = 6, kv = 2, room = 40, held = ROWS_IN * kv * room * width;      \
        float *cos = made_f32(ROWS_IN * width / 2), *sin = made_f32(ROWS_IN * width / 2);                              \
        T *qkv = made_##T(ROWS_IN * (heads + 2 * kv) * width), *keys = made_##T(held), *values = made_##T(held);       \
        T *out = made_##T(ROWS_IN * heads * width);                                                                    \
        attend_##T(qkv, cos, sin, keys, values, lengths, out, ROWS_IN, heads, kv, width, room, 0.2f, THREADS);         \
        show_##T("attend", out, ROWS_IN * heads * width);                                                              \
        show_##T("keys", keys, held);                                                                                  \
        show_##T("values", values, held);                                                                              \
    }                                                                                                                  \
    {                                                                                                                  \
        int64_t width = 37, n = ROWS_IN * width, vocab = 700, tokens[ROWS_IN];                                         \
        double u[] = {0.0, 0.2, 0.5, 0.8, 0.999};                                                                      \
        float logprobs[ROWS_IN], found[ROWS_IN];                                                                       \
        T *x = made_##T(n), *added = made_##T(n), *weight = made_##T(width), *out = made_##T(n);                       \
        T *logits = made_##T(ROWS_IN * vocab);                                                                         \
        add_norm_##T(x, added, weight, out, ROWS_IN, width, 1e-5f, THREADS);                                           \
        show_##T("x", x, n);                                                                                           \
        show_##T("add_norm", out, n);                                                                                  \
        draw_##T(logits, u, tokens, logprobs, ROWS_IN, vocab, 1.25f, THREADS);                                         \
        for (int i = 0; i < ROWS_IN; i++) found[i] = (float)tokens[i];                                                 \
        show_f32("tokens_" #T, found, ROWS_IN);                                                                        \
        show_f32("logprobs_" #T, logprobs, ROWS_IN);                                                                   \
    }

int main(void) {
#if defined(FILE_head)
    HEAD(f32) HEAD(bf16)
#elif defined(FILE_flat)
    FLAT(f32) FLAT(bf16)
#elif defined(FILE_attend)
    ATTEND(f32) ATTEND(bf16)
#elif defined(FILE_decode)
    DECODE(f32) DECODE(bf16)
#else
#error "a C file without a line here"
#endif
    return 0;
}
