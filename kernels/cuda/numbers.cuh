// Numbers bit for bit as the codecs of the disk tier make them (storage_backends/codecs_quantised.py): the same
// scale, the same rounding, the same mend for NaN and inf. Intrinsics with a rounding mode are never contracted
// into fused operations; the rest is arithmetic on bits.

#pragma once

#include "pages.cuh"

#define DTYPE_float32 1
#define DTYPE_float16 2
#define DTYPE_bfloat16 3
#define FORMAT_fp8 1
#define FORMAT_int8 2

constexpr u32 sign_bit = 0x80000000u;
constexpr u32 infinity = 0x7F800000u;

// A value of the device as float32, exactly; NaN stays NaN and inf stays inf.
__device__ __forceinline__ float widened(u32 bits) {
#if DTYPE == DTYPE_float32
    return __uint_as_float(bits);
#elif DTYPE == DTYPE_bfloat16
    return __uint_as_float(bits << 16);
#else
    const u32 sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7FFFu) << 13;
    if (magnitude >= 0x0F800000u) return __uint_as_float(sign | infinity | magnitude);
    // The product corrects the bias of the exponent: 127 instead of 15.
    return __fmul_rn(__uint_as_float(sign | magnitude), __uint_as_float(0x77800000u));  // 2^112
#endif
}

// A finite value rounded half to even to what the device holds.
__device__ __forceinline__ u32 narrowed(float value) {
    const u32 bits = __float_as_uint(value);
#if DTYPE == DTYPE_float32
    return bits;
#elif DTYPE == DTYPE_bfloat16
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
#else
    const u32 sign = (bits & sign_bit) >> 16, magnitude = bits & ~sign_bit;
    // Below 2^-14 all float16 are multiples of 2^-24, the spacing of float32 from 0.5 to 1.
    if (magnitude < 0x38800000u) {
        return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3F000000u);
    }
    const u32 rounded = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    return sign | (rounded < 0x7C00u ? rounded : 0x7C00u);
#endif
}

#if FORMAT == FORMAT_fp8
constexpr float limit = 448.0f;
#elif FORMAT == FORMAT_int8
constexpr float limit = 127.0f;
#else
#error "FORMAT is FORMAT_fp8 or FORMAT_int8"
#endif

// The scale of a plane whose largest finite magnitude is `peak`: no subnormal, and limit * scale is finite.
__device__ __forceinline__ float scale_of(float peak) {
    if (peak == 0.0f) return 0.0f;
    const u32 smallest = 0x00800000u;  // 2^-126
    const u32 quotient = __float_as_uint(__fdiv_rn(peak, limit));
    const u32 scale = quotient > smallest ? quotient : smallest;
    const bool overflows = __float_as_uint(__fmul_rn(__uint_as_float(scale), limit)) == infinity;
    return __uint_as_float(overflows ? scale - 1 : scale);
}

// A value as the codec mends it: NaN becomes 0, and a magnitude above that of `bound` becomes it.
__device__ __forceinline__ float tamed(float value, u32 bound) {
    const u32 bits = __float_as_uint(value), magnitude = bits & ~sign_bit;
    if (magnitude > infinity) return 0.0f;
    return __uint_as_float((bits & sign_bit) | (magnitude < bound ? magnitude : bound));
}

// The code of value / scale, which is within +-limit; its low byte counts.
__device__ __forceinline__ u32 code_of(float value, float scale) {
    const float quotient = __fdiv_rn(value, scale);
#if FORMAT == FORMAT_int8
    return static_cast<u32>(__float2int_rn(quotient)) & 0xFFu;
#else
    // Times 2^-120 the exponent has float8's bias, subnormals included; 20 bits of mantissa are rounded away.
    const u32 bits = __float_as_uint(__fmul_rn(quotient, __uint_as_float(0x03800000u)));  // 2^-120
    return ((bits & ~sign_bit) + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20 | ((bits >> 24) & 0x80u);
#endif
}

// What a code stands for, times scale, as the device holds it; codes that code_of does not make stand for 0.
__device__ __forceinline__ u32 value_of(u32 code, float scale) {
#if FORMAT == FORMAT_int8
    const float value = code == 0x80u ? 0.0f : static_cast<float>(static_cast<signed char>(code));
#else
    const u32 bits = (code & 0x7Fu) == 0x7Fu ? 0u : (code & 0x80u) << 24 | (code & 0x7Fu) << 20;
    const float value = __fmul_rn(__uint_as_float(bits), __uint_as_float(0x7B800000u));  // 2^120
#endif
    return narrowed(__fmul_rn(scale, value));
}
