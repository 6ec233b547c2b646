/* Storage types: floats, and bfloat16 as the upper half of one. Everything is computed in float. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__)
__attribute__((__simd__("notinbranch"))) extern float expf(float); /* libmvec has it for whole vectors */
#endif

typedef uint16_t bf16;
typedef float f32;

static inline float get_f32(const float *p) { return *p; }
static inline void put_f32(float *p, float x) { *p = x; }

static inline float get_bf16(const bf16 *p) {
    uint32_t bits = (uint32_t)*p << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline void put_bf16(bf16 *p, float x) { /* to nearest, ties to even, as torch rounds */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
