// Few rows of x with AVX2. A block is 16 kept values and the fp32 inputs of their 8 groups, which stand in an order of
// their own: of the eight values of a register, the first two in each lane belong to the groups in the two lanes of one
// register of x, and the others to those of its neighbour. So the two bits of position, which are all that a shuffle
// within a lane reads of its index, pick a value's input, and a blend joins the two halves.
#pragma once

#define ISA_AVX2 "avx2,fma,f16c"

constexpr int64_t BLOCK = 16;  // kept values; a word of positions

// How 16 values become two registers of fp32: which of them the first has (its neighbour's come `NEXT` later), and in
// which order their groups stand.
template <typename T>
struct Sixteen;

template <>
struct Sixteen<float> {
    static constexpr float UNIT = 1;
    static constexpr int FIRST[8] = {0, 1, 2, 3, 4, 5, 6, 7}, NEXT = 8, ORDER[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    ISA(ISA_AVX2) static INLINE void load(const float* from, __m256& low, __m256& high) {
        low = _mm256_loadu_ps(from), high = _mm256_loadu_ps(from + 8);
    }
};

template <>
struct Sixteen<c10::BFloat16> {  // a zero before each value makes fp32 of it, four values a lane
    static constexpr float UNIT = 1;
    static constexpr int FIRST[8] = {0, 1, 2, 3, 8, 9, 10, 11}, NEXT = 4, ORDER[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    ISA(ISA_AVX2) static INLINE void load(const c10::BFloat16* from, __m256& low, __m256& high) {
        const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), zero = _mm256_setzero_si256();
        low = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, all));
        high = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, all));
    }
};

template <>
struct Sixteen<Int8> : Sixteen<float> {
    ISA(ISA_AVX2) static INLINE __m256 eight(const Int8* from) {
        const __m128i code = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(code));
    }
    ISA(ISA_AVX2) static INLINE void load(const Int8* from, __m256& low, __m256& high) {
        low = eight(from), high = eight(from + 8);
    }
};

template <>
struct Sixteen<Int4> : Sixteen<float> {
    ISA(ISA_AVX2) static INLINE __m256 eight(int32_t pairs) {
        const __m256i left = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(pairs), left), 28));
    }
    ISA(ISA_AVX2) static INLINE void load(const Int4* from, __m256& low, __m256& high) {
        int32_t word[2];
        std::memcpy(word, from, sizeof word);
        low = eight(word[0]), high = eight(word[1]);
    }
};

template <>
struct Sixteen<Fp8> : Sixteen<float> {  // by way of fp16, 256 times too small: no flag flushes small numbers there
    static constexpr float UNIT = 256;
    ISA(ISA_AVX2) static INLINE void load(const Fp8* from, __m256& low, __m256& high) {
        const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        const __m256i half = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(int16_t(0xBF80)));
        low = _mm256_cvtph_ps(_mm256_castsi256_si128(half)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
};

// Sixteen values as fp32, of int4 scaled.
template <typename V>
ISA(ISA_AVX2)
INLINE void load_sixteen(const V* from, const Place& place, __m256& low, __m256& high) {
    Sixteen<V>::load(from, low, high);
    if constexpr (std::is_same_v<V, Int4>) {
        const __m256 scale = _mm256_set1_ps(place.scale());
        low = _mm256_mul_ps(low, scale), high = _mm256_mul_ps(high, scale);
    }
}

// The inputs that eight values meet, of two registers of x.
ISA(ISA_AVX2) INLINE __m256 meet(__m256 outer, __m256 inner, __m256i index) {
    return _mm256_blend_ps(_mm256_permutevar_ps(outer, index), _mm256_permutevar_ps(inner, index), 0b11001100);
}

ISA(ISA_AVX2) INLINE float total(__m256 sum) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

template <typename V, int R, int M>
ISA(ISA_AVX2)
INLINE void avx2_step(const Job& job, const float* x, const V* values, int64_t stride, const uint8_t* positions,
                      int64_t position_stride, int64_t output, int64_t at, __m256 (&sum)[R][M]) {
    using S = Sixteen<V>;
    const __m256i first = _mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(S::FIRST)), 1);
    const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(2 * S::NEXT));
    __m256 input[M][4];
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < 4; ++i) input[m][i] = _mm256_loadu_ps(x + m * job.x_stride + 8 * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        int32_t word;
        std::memcpy(&word, positions + r * position_stride, sizeof word);
        const __m256i bits = _mm256_set1_epi32(word);
        const __m256i low = _mm256_srlv_epi32(bits, first), high = _mm256_srlv_epi32(bits, second);
        __m256 kept, more;
        load_sixteen(values + r * stride, Place{job, output + r, at}, kept, more);
        for (int m = 0; m < M; ++m) {
            sum[r][m] = _mm256_fmadd_ps(meet(input[m][0], input[m][1], low), kept, sum[r][m]);
            sum[r][m] = _mm256_fmadd_ps(meet(input[m][2], input[m][3], high), more, sum[r][m]);
        }
    }
}

template <typename T, typename V, int R, int M>
ISA(ISA_AVX2)
void avx2_block(const Job& job, int64_t row, int64_t output) {
    constexpr int64_t LINE = 64 / sizeof(V) * PER<V>;
    const int64_t stride = job.kept_count / PER<V>;
    const auto* x = static_cast<const float*>(job.x) + row * job.x_stride;
    const auto* values = static_cast<const V*>(job.values) + output * stride;
    const auto* positions = job.positions + output * job.position_bytes;
    __m256 sum[R][M];
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) sum[r][m] = _mm256_setzero_ps();
    int64_t at = 0;
    const auto* later = positions + 2 * R * job.position_bytes;
    for (; at + LINE <= job.kept_count; at += LINE, later += LINE / 4 * R) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) fetch(values + at / PER<V> + (R + r) * stride);
        for (int i = 0; i < LINE / 4 * R; i += 64) fetch(later + i);
#pragma GCC unroll 2
        for (int64_t i = at; i < at + LINE; i += BLOCK)
            avx2_step<V, R, M>(job, x + 2 * i, values + i / PER<V>, stride, positions + i / 4, job.position_bytes,
                               output, i, sum);
    }
    for (; at < job.kept_count; at += BLOCK) {  // through copies, with zeros behind the last value
        const int64_t count = std::min(BLOCK, job.kept_count - at);
        V padded[R][BLOCK / PER<V>] = {};
        uint8_t words[R][4] = {};
        for (int r = 0; r < R; ++r) {
            std::memcpy(padded[r], values + r * stride + at / PER<V>, count / PER<V> * sizeof(V));
            std::memcpy(words[r], positions + r * job.position_bytes + at / 4, (count + 3) / 4);
        }
        avx2_step<V, R, M>(job, x + 2 * at, padded[0], BLOCK / PER<V>, words[0], 4, output, at, sum);
    }
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) store<T>(job, row + m, output + r, Sixteen<V>::UNIT * total(sum[r][m]));
}

template <typename T, typename V, int R>
void avx2_outputs(const Job& job, int64_t output) {
    int64_t row = 0;
    for (; row + 2 <= job.rows; row += 2) avx2_block<T, V, R, 2>(job, row, output);
    if (row < job.rows) avx2_block<T, V, R, 1>(job, row, output);
}

template <typename T, typename V = T>
void avx2_rows(const Job& job, int64_t output, int64_t end) {
    if (job.rows == 1)
        for (; output + 8 <= end; output += 8) avx2_block<T, V, 8, 1>(job, 0, output);
    for (; output + 4 <= end; output += 4) avx2_outputs<T, V, 4>(job, output);
    for (; output < end; ++output) avx2_outputs<T, V, 1>(job, output);
}

ISA(ISA_AVX2) INLINE void avx2_put(float* to, __m256 low, __m256 high) {
    _mm256_storeu_ps(to, low), _mm256_storeu_ps(to + 8, high);
}
ISA(ISA_AVX2) INLINE __m256i avx2_rounded(__m256 value) {  // to bf16, ties to even
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
}
ISA(ISA_AVX2) INLINE void avx2_put(c10::BFloat16* to, __m256 low, __m256 high) {
    const __m256i a = avx2_rounded(low), b = avx2_rounded(high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8));
}

// Rounded values of an output as fp32 or bf16, with room for 15 more behind the last.
template <typename T, typename V>
ISA(ISA_AVX2)
void avx2_decode(T* to, const V* from, int64_t count, const Job& job, int64_t output) {
    const __m256 unit = _mm256_set1_ps(Sixteen<V>::UNIT);
    for (int64_t at = 0; at < count; at += BLOCK) {
        V padded[BLOCK / PER<V>] = {};
        if (count - at < BLOCK) std::copy_n(from + at / PER<V>, (count - at) / PER<V>, padded);
        __m256 low, high;
        load_sixteen(count - at < BLOCK ? padded : from + at / PER<V>, Place{job, output, at}, low, high);
        avx2_put(to + at, _mm256_mul_ps(low, unit), _mm256_mul_ps(high, unit));
    }
}
