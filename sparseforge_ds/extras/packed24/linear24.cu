// y = x W^T for few rows of x and a packed 2:4 weight (values: two of four; positions: a nibble a group), by the sparse
// tensor cores of NVIDIA GPUs from compute capability 8.0 on. `mma_kernel.py` compiles and launches it.
//
// A superstep is 256 inputs. A lane (g = lane / 4, t = lane % 4) loads, for weight rows g and g + 8, 16 bytes of values
// from each of its four blocks q of 64 inputs (groups 4t .. 4t+3 of block q) and the 8 bytes of positions of block t.
// mma (j, s), j < 4, s < 2, takes group 4t + j of block 2s as the lane's element of the first 16 inputs and that of
// block 2s + 1 as its element of the last 16. The lane that supplies the metadata of block 2s + h is 2s + h of a quad:
// its own. x lies in shared memory in the order of the fragments of B:
// [superstep][tile of 8 rows][j, s][lane, swizzled][4 words]. Of few rows it has the lanes of the first XR alone, which
// the others read, too: what they make of it is not stored.
//
// Warps of a block share x. WO of them have different outputs and WK different inputs, whose sums meet in shared memory.
// A block takes tiles of outputs in turn, and each warp has U supersteps of weights on their way (cp.async, each lane
// its own pieces). gridDim.y parts of the inputs leave fp32 sums in `part`, which `sum24` adds up.
//
// Values in 8 or 4 bits: a lane loads 8 or 4 bytes of them, and makes 16-bit numbers of them when it takes them
// (`expand`). Sums are scaled when they are stored; where PER_SCALE blocks share a scale, the 16-bit numbers
// are. Lane t of row g loads the scale of block t, with its neighbour in the same four bytes, for all lanes of its row.
//
// Macros: NT tiles of 8 rows of x; XR rows of a tile in shared memory, 2, 4 or 8 (with NT > 1: 8); WM tiles of 16 outputs
// a warp; WO, WK, U; TAIL: inputs % 256 != 0; HALF: fp16; INT8, FP8 (e4m3) or INT4: rounded values; PER_SCALE,
// with INT4: blocks that share a scale, or 0; ORDERED: the compiler knows mma.sp::ordered_metadata; OVERLAP: the launch
// lets a block begin before the kernel ahead of it in the stream has ended (compute capability 9.0 on).
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#ifndef PER_SCALE
#define PER_SCALE 0
#endif
#if defined(INT4)
#define KEPT 4
typedef u32 Kept;
#elif defined(INT8) || defined(FP8)
#define KEPT 8  // bytes of a lane's values of a block
typedef uint2 Kept;
#else
#define KEPT 16
typedef uint4 Kept;
#endif
#ifdef STAGES
#define THREADS (32 * WO * WR)
#else
#define THREADS (32 * WO * WK)
#endif
#ifdef INT4
typedef u16 Scale;  // the bits of bf16
#else
typedef float Scale;
#endif
#define SCALES (PER_SCALE ? 256 : 0)
#define SLOT (WM * (256 * KEPT + 512 + SCALES))
#define FRAGMENT (XR * 64)

#ifndef EMULATED  // a test on the host brings its own
#ifdef HALF
#define TYPES "f32.f16.f16.f32"
#define PAIR "f16x2"
#define MINUS_ONES 0xBC00BC00u
#else
#define TYPES "f32.bf16.bf16.f32"
#define PAIR "bf16x2"
#define MINUS_ONES 0xBF80BF80u
#endif
#ifdef ORDERED
#define MMA "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." TYPES
#else
#define MMA "mma.sp.sync.aligned.m16n8k32.row.col." TYPES
#endif
template <int SELECTOR>
__device__ __forceinline__ void mma(float4& c, u32 a0, u32 a1, u32 a2, u32 a3, uint4 b, u32 e) {
  asm volatile(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
               : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(e), "n"(SELECTOR));
}
__device__ __forceinline__ u16 narrow(float v) {
  u16 r;
#ifdef HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
#else
  asm("{.reg .b32 t; cvt.rn.bf16x2.f32 t, %1, %1; cvt.u16.u32 %0, t;}" : "=h"(r) : "f"(v));
#endif
  return r;
}
__device__ __forceinline__ float wide(u16 v) {
  float r;
#ifdef HALF
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
#else
  r = __uint_as_float((u32)v << 16);
#endif
  return r;
}
__device__ __forceinline__ float bf16_bits(u16 v) { return __uint_as_float((u32)v << 16); }
// Two 16-bit numbers: differences, and products.
__device__ __forceinline__ u32 minus(u32 a, u32 b) {
  u32 r;
  asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(r) : "r"(b), "r"(MINUS_ONES), "r"(a));
  return r;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 r;
  asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}
// Sixteen bytes to shared memory, zeros where not `there`.
__device__ __forceinline__ void copy16(char* to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy8(char* to, const char* from, bool there = true) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 8 : 0) : "memory");
}
__device__ __forceinline__ void copy4(char* to, const char* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(char* to, const char* from, bool there) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
// What follows sees all that kernels ahead in the stream have written, and the next kernel may begin.
__device__ __forceinline__ void after_kernels_ahead() {
#ifdef OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#define SHARED_MEMORY extern __shared__ __align__(128) char shared[];
#endif

// MADE_AHEAD: a pointer to what the kernel ahead may still write while this one has begun. Behind __restrict__ the compiler
// could read it by a path that takes memory for constant.
#ifdef OVERLAP
#define MADE_AHEAD
#else
#define MADE_AHEAD __restrict__
#endif

__device__ __forceinline__ u32 word(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

__device__ __forceinline__ float wide_scale(float scale) { return scale; }
__device__ __forceinline__ float wide_scale(u16 scale) { return bf16_bits(scale); }

// Nibbles j, 4 + j, 8 + j, 12 + j of eight bytes, in the lower half (the upper half is not meant).
__device__ __forceinline__ u32 pick(uint2 m, int j) {
  u32 low = j ? m.x >> 4 * j : m.x;
  u32 high = j < 2 ? m.y << (8 - 4 * j) : j > 2 ? m.y >> (4 * j - 8) : m.y;
  u32 v = (low & 0x000F000Fu) | (high & 0x0F000F00u);
  return v | v >> 12;
}

// A lane's eight values of a block as 16-bit numbers.
__device__ __forceinline__ uint4 expand(uint4 kept) { return kept; }
__device__ __forceinline__ u32 decode(u32 codes, bool upper) {
#ifdef INT8
  // 128 + the lower 7 bits, less 128, or 256 where bit 7 is set; of fp16 1024 in place of the first two.
#ifdef HALF
  const u32 magic = 0x64006400u;
#else
  const u32 magic = 0x43004300u;
#endif
  const u32 w = __byte_perm(codes, 0, upper ? 0x4342 : 0x4140);
  return minus(magic | (w & 0x007F007Fu), magic | (w & 0x00800080u));
#else
  // Exponent and mantissa at their places, and a factor for the other bias, which small numbers survive.
  const u32 w = __byte_perm(codes, 0, upper ? 0x3424 : 0x1404);
#ifdef HALF
  return times((w & 0x80008000u) | (w & 0x7F007F00u) >> 1, 0x5C005C00u);
#else
  return times((w & 0x80008000u) | (w & 0x7F007F00u) >> 4, 0x7B807B80u);
#endif
#endif
}
// Two of int4, the lower one in the lower half: 136 + it, less 136; of fp16 1032.
__device__ __forceinline__ u32 decode4(u32 pair) {
#ifdef HALF
  const u32 magic = 0x64006400u;
#else
  const u32 magic = 0x43004300u;
#endif
  const u32 w = (pair & 0xFu) | (pair << 12 & 0x000F0000u);
  return minus(magic | (w ^ 0x00080008u), magic | 0x00080008u);
}
__device__ __forceinline__ uint4 expand(u32 kept) {
  return make_uint4(decode4(kept), decode4(kept >> 8), decode4(kept >> 16), decode4(kept >> 24));
}
// Two 16-bit numbers times a scale in bf16, rounded once.
__device__ __forceinline__ u32 scaled(u32 pair, u16 scale) {
#ifdef HALF
  const float factor = bf16_bits(scale);
  return (u32)narrow(wide(pair) * factor) | (u32)narrow(wide(pair >> 16) * factor) << 16;
#else
  return times(pair, scale | (u32)scale << 16);
#endif
}
__device__ __forceinline__ uint4 expand(uint2 kept) {
  return make_uint4(decode(kept.x, false), decode(kept.x, true), decode(kept.y, false), decode(kept.y, true));
}

#ifndef STAGES
struct Stage {
  uint4 value[WM][4][2];
  uint2 place[WM][2];
};

// A superstep into a slot: [output tile, half, q][lane] of KEPT bytes, then [output tile, half][lane] of 8 bytes.
__device__ __forceinline__ void fetch(char* slot, const char* values, const char* positions, const char* scales,
                                      int output, int inputs, int out, int superstep, int g, int t) {
  const int lane = g * 4 + t;
#pragma unroll
  for (int m = 0; m < WM; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = min(output + 16 * m + 8 * half + g, out - 1);
      const char* v = values + (u64)row * (inputs * KEPT / 16) + superstep * (16 * KEPT) + t * KEPT;
      const char* p = positions + (u64)row * (inputs >> 3) + superstep * 32 + t * 8;
      char* to = slot + (m * 2 + half) * (128 * KEPT) + lane * KEPT;
      uint2* place = (uint2*)(slot + WM * (256 * KEPT) + (m * 2 + half) * 256 + lane * 8);
      if (PER_SCALE) {
        const int groups = (inputs >> 6) / (PER_SCALE + !PER_SCALE);
        const int group = (superstep * 4 + t) / (PER_SCALE + !PER_SCALE);
        const u64 at = (u64)row * groups + min(group, groups - 1);
        copy4(slot + WM * (256 * KEPT + 512) + (m * 2 + half) * 128 + lane * 4, scales + (at & ~(u64)1) * 2);
      }
      if (!TAIL || superstep * 256 + t * 64 < inputs)
        copy8((char*)place, p);
      else
        *place = make_uint2(0x44444444u, 0x44444444u);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        bool there = !TAIL || superstep * 256 + q * 64 < inputs;
        const char* from = there ? v + q * (4 * KEPT) : values;
        if (KEPT == 16)
          copy16(to + q * (32 * KEPT), from, there);
        else if (KEPT == 4)
          copy4(to + q * (32 * KEPT), from, there);
        else
          copy8(to + q * (32 * KEPT), from, there);
      }
    }
}

// The scale that a lane has loaded into a slot.
__device__ __forceinline__ u32 own_scale(const char* slot, int output, int inputs, int out, int superstep, int m,
                                         int half, int lane) {
  const int groups = (inputs >> 6) / (PER_SCALE + !PER_SCALE);
  const int group = (superstep * 4 + (lane & 3)) / (PER_SCALE + !PER_SCALE);
  const u32 row = min(output + 16 * m + 8 * half + (lane >> 2), out - 1);
  const u32 pair = *(const u32*)(slot + WM * (256 * KEPT + 512) + (m * 2 + half) * 128 + lane * 4);
  return (row * groups + min(group, groups - 1)) & 1 ? pair >> 16 : pair & 0xFFFFu;
}

__device__ __forceinline__ void take(Stage& stage, const char* slot, int output, int inputs, int out, int superstep,
                                     int lane) {
#pragma unroll
  for (int m = 0; m < WM; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      stage.place[m][half] = *(const uint2*)(slot + WM * (256 * KEPT) + (m * 2 + half) * 256 + lane * 8);
      const u32 own = PER_SCALE ? own_scale(slot, output, inputs, out, superstep, m, half, lane) : 0;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        uint4 v = expand(*(const Kept*)(slot + ((m * 2 + half) * 128 + q * 32 + lane) * KEPT));
        if (PER_SCALE) {
          const u16 scale = (u16)__shfl_sync(0xFFFFFFFFu, own, q, 4);
          v = make_uint4(scaled(v.x, scale), scaled(v.y, scale), scaled(v.z, scale), scaled(v.w, scale));
        }
        stage.value[m][q][half] = v;
      }
    }
}

__device__ __forceinline__ void multiply(float4 (&c)[WM][NT], const Stage& stage, const char* xs, int lane) {
  u32 e[WM][4];
#pragma unroll
  for (int m = 0; m < WM; m++)
#pragma unroll
    for (int j = 0; j < 4; j++) e[m][j] = __byte_perm(pick(stage.place[m][0], j), pick(stage.place[m][1], j), 0x5410);
#pragma unroll
  for (int js = 0; js < 8; js++) {
    const int j = js >> 1, s = js & 1;
    const char* b = xs + js * FRAGMENT + (((lane & (4 * XR - 1)) ^ ((js >> 2) << 2 | s)) << 4);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      uint4 x = *(const uint4*)(b + n * 8 * FRAGMENT);
#pragma unroll
      for (int m = 0; m < WM; m++) {
        u32 a0 = word(stage.value[m][2 * s][0], j), a1 = word(stage.value[m][2 * s][1], j);
        u32 a2 = word(stage.value[m][2 * s + 1][0], j), a3 = word(stage.value[m][2 * s + 1][1], j);
        if (s)
          mma<1>(c[m][n], a0, a1, a2, a3, x, e[m][j]);
        else
          mma<0>(c[m][n], a0, a1, a2, a3, x, e[m][j]);
      }
    }
  }
}

// x of supersteps first .. first + mine into shared memory: a warp takes a superstep of a row, a lane eight inputs of
// it. Eight loads are on their way at once, as each takes as long as reading many weights.
__device__ __forceinline__ void fill(char* shared, const u16* x, int rows, int inputs, int first, int mine, int warp,
                                     int lane) {
  const int q = lane >> 3, t = lane >> 1 & 3, j = lane & 1, s = q >> 1;
  const int at = (2 * (t & 1)) ^ (j << 2 | s);  // lane of the fragment in row 0, swizzled
  char* const to = shared + (4 * j + s) * FRAGMENT + ((t >> 1) + 2 * (q & 1)) * 4;
  const int count = rows * mine;
#pragma unroll 1
  for (int begin = warp; begin < count; begin += 8 * WO * WK) {
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; u++) {
      int i = begin + u * WO * WK, n = i / mine, input = (first + i - n * mine) * 256 + lane * 8;
      v[u] = make_uint4(0, 0, 0, 0);
      if (i < count && (!TAIL || input < inputs)) v[u] = *(const uint4*)(x + (u64)n * inputs + input);
    }
#pragma unroll
    for (int u = 0; u < 8; u++) {
      int i = begin + u * WO * WK, n = i / mine, step = i - n * mine;
      if (i >= count) break;
      char* even = to + (step * NT + (n >> 3)) * 8 * FRAGMENT + (at ^ 4 * (n & 7)) * 16;
      char* odd = to + (step * NT + (n >> 3)) * 8 * FRAGMENT + (at ^ 4 * (n & 7) ^ 1) * 16;
      *(u32*)even = v[u].x;
      *(u32*)odd = v[u].y;
      *(u32*)(even + 2 * FRAGMENT) = v[u].z;
      *(u32*)(odd + 2 * FRAGMENT) = v[u].w;
    }
  }
}
#endif

struct Target {
  const Scale* scale;  // of rows of rounded values, or none
  const u16* bias;
  u16* y;
  float* part;  // of these inputs, or none
  int rows, out;
};

__device__ __forceinline__ void store(const Target& to, float v, int n, int o) {
  if (n >= to.rows || o >= to.out) return;
  if (to.part) {
    to.part[(u64)n * to.out + o] = v;
    return;
  }
  if (to.scale) v *= wide_scale(to.scale[o]);
  to.y[(u64)n * to.out + o] = narrow(to.bias ? v + wide(to.bias[o]) : v);
}
__device__ __forceinline__ void store4(const Target& to, float4 v, int n, int o) {
  store(to, v.x, n, o);
  store(to, v.y, n + 1, o);
  store(to, v.z, n, o + 8);
  store(to, v.w, n + 1, o + 8);
}

#ifndef STAGES
// Dynamic shared memory: x, supersteps of a part * NT * 8 * FRAGMENT bytes; then the sums, WO * WK * WM * NT * 512 bytes (none
// with WK 1); then WO * WK * U slots. `part`: (gridDim.y, rows, out), or none with one part.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear24(const char* __restrict__ values, const char* __restrict__ positions, const u16* MADE_AHEAD x,
             const Scale* __restrict__ scale, const u16* __restrict__ bias, u16* __restrict__ y,
             float* MADE_AHEAD part, int rows, int out, int inputs) {
  SHARED_MEMORY
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int wk = warp % WK, wo = warp / WK;
  const int all = (inputs + 255) / 256, each = (all + gridDim.y - 1) / gridDim.y, first = blockIdx.y * each;
  const int mine = max(0, min(each, all - first));  // supersteps of this part
  const int steps = (each + WK - 1) / WK;           // of a warp, for each tile of outputs
  const int tasks = (out + 16 * WM * WO - 1) / (16 * WM * WO);
  const int total = blockIdx.x < tasks ? ((tasks - 1 - blockIdx.x) / gridDim.x + 1) * steps : 0;
  float* part_of_block = part ? part + (u64)blockIdx.y * rows * out : part;
  const Target to = {PER_SCALE ? nullptr : scale, bias, y, part_of_block, rows, out};
  float4* sums = (float4*)(shared + each * NT * 8 * FRAGMENT);
  char* const ring = (char*)sums + (WK == 1 ? 0 : WO * WK * WM * NT * 512) + warp * (U * SLOT);

  int next_task = blockIdx.x, next_step = 0, left = total;
  auto fetch_next = [&](int slot) {
    if (left > 0) {
      int k = wk + next_step * WK;
      if (k < mine)
        fetch(ring + slot * SLOT, values, positions, (const char*)scale, (next_task * WO + wo) * 16 * WM, inputs, out, first + k, g, t);
      if (++next_step == steps) next_step = 0, next_task += gridDim.x;
      left--;
    }
    commit();
  };
#pragma unroll
  for (int u = 0; u < U; u++) fetch_next(u);
  after_kernels_ahead();  // they make x, and none of them the weights
  fill(shared, x, rows, inputs, first, mine, warp, lane);
  __syncthreads();

  float4 c[WM][NT];
#pragma unroll
  for (int m = 0; m < WM; m++)
#pragma unroll
    for (int n = 0; n < NT; n++) c[m][n] = make_float4(0, 0, 0, 0);

  Stage stage;
  int task = blockIdx.x, step = 0, slot = 0;
#pragma unroll 1
  for (int it = 0; it < total; it++) {
    int k = wk + step * WK;
    arrived<U - 1>();
    if (k < mine) take(stage, ring + slot * SLOT, (task * WO + wo) * 16 * WM, inputs, out, first + k, lane);
    fetch_next(slot);
    if (++slot == U) slot = 0;
    if (k < mine) multiply(c, stage, shared + k * NT * 8 * FRAGMENT, lane);
    if (++step < steps) continue;
    const int base = task * WO * 16 * WM;
    if (WK == 1) {
#pragma unroll
      for (int m = 0; m < WM; m++)
#pragma unroll
        for (int n = 0; n < NT; n++) store4(to, c[m][n], n * 8 + 2 * t, base + (wo * WM + m) * 16 + g);
    } else {
      __syncthreads();  // the sums before these are read
#pragma unroll
      for (int m = 0; m < WM; m++)
#pragma unroll
        for (int n = 0; n < NT; n++) sums[(wk * WO + wo) * WM * NT * 32 + (m * NT + n) * 32 + lane] = c[m][n];
      __syncthreads();
      for (int f = thread; f < WO * WM * NT * 32; f += THREADS) {
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WK; w++) {
          float4 z = sums[w * WO * WM * NT * 32 + f];
          v.x += z.x, v.y += z.y, v.z += z.z, v.w += z.w;
        }
        int l = f & 31, tile = f >> 5;
        store4(to, v, tile % NT * 8 + 2 * (l & 3), base + tile / NT * 16 + (l >> 2));
      }
    }
#pragma unroll
    for (int m = 0; m < WM; m++)
#pragma unroll
      for (int n = 0; n < NT; n++) c[m][n] = make_float4(0, 0, 0, 0);
    step = 0, task += gridDim.x;
  }
}
#endif

// part (parts, rows, out), n = rows * out -> y (rows, out); four elements a thread where out % 4 == 0.
extern "C" __global__ void __launch_bounds__(256)
    sum24(const float* MADE_AHEAD part, const Scale* __restrict__ scale, const u16* __restrict__ bias,
          u16* __restrict__ y, int n, int out, int parts) {
  if (PER_SCALE) scale = nullptr;  // the weights were scaled
  after_kernels_ahead();
  const int width = out % 4 ? 1 : 4, i = (blockIdx.x * 256 + threadIdx.x) * width;
  if (i >= n) return;
  if (width == 1) {
    float s = 0;
    for (int k = 0; k < parts; k++) s += part[(u64)k * n + i];
    if (scale) s *= wide_scale(scale[i % out]);
    y[i] = narrow(bias ? s + wide(bias[i % out]) : s);
    return;
  }
  float4 s = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int k = 0; k < parts; k++) {
    float4 v = *(const float4*)(part + (u64)k * n + i);
    s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
  }
  const int o = i % out;
  if (scale) {
    s.x *= wide_scale(scale[o]), s.y *= wide_scale(scale[o + 1]);
    s.z *= wide_scale(scale[o + 2]), s.w *= wide_scale(scale[o + 3]);
  }
  if (bias) {
    s.x += wide(bias[o]), s.y += wide(bias[o + 1]), s.z += wide(bias[o + 2]), s.w += wide(bias[o + 3]);
  }
  *(ushort4*)(y + i) = {narrow(s.x), narrow(s.y), narrow(s.z), narrow(s.w)};
}
