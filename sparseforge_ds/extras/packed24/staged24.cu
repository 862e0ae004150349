// y = x W^T for 33 to 256 rows of x, which do not fit into shared memory. Compiled behind linear24.cu, whose instruction,
// decoding, `store` and `sum24` it takes.
//
// A block computes OUTPUTS x ROWS numbers of y. A step is 64 inputs. cp.async brings them STAGES - 1 steps ahead into a
// slot: ROWS rows of x, 128 bytes each, and OUTPUTS rows of values, of positions (8 bytes) and of int4's scales. WO warps
// have different outputs and WR different rows. A warp has WM tiles of 16 outputs and NT tiles of 8 rows, in registers.
// gridDim.x is blocks of outputs times blocks of rows, rows first: blocks that read the same weights run together, and
// one of them brings the weights into the L2 cache. gridDim.y parts of the inputs leave fp32 sums in `part`.
//
// Inputs keep their order. A step is two mma: the kept values of 32 inputs are a 16 x 16 matrix of stored numbers, and
// the positions of a row's 32 inputs one word. Lanes 0 and 1 of a quad supply the metadata of the first mma, lanes 2
// and 3 those of the second. Chunks of 16 bytes are swizzled: eight rows of one chunk lie in different banks.
//
// Macros: WM, NT, WO, WR, STAGES; RESIDENT: blocks that share a multiprocessor; and those of linear24.cu.
#define OUTPUTS (16 * WM * WO)
#define ROWS (8 * NT * WR)
#define CHUNKS (KEPT / 4)  // of a row's values in a step
#define VALUES_AT (ROWS * 128)
#define POSITIONS_AT (VALUES_AT + OUTPUTS * CHUNKS * 16)
#define SCALES_AT (POSITIONS_AT + OUTPUTS * 8)
#define STAGE (SCALES_AT + (PER_SCALE ? OUTPUTS * 4 : 0))

#ifndef EMULATED
template <typename T>
__device__ __forceinline__ T from_shared(const char* at) { return *(const T*)at; }
// Four matrices of 8 rows of 16 bytes. A lane names a row of matrix lane / 8, and has word lane % 4 of rows lane / 4.
__device__ __forceinline__ uint4 load_matrices(const char* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
  return v;
}
#endif

// Where chunk c of a row lies, for rows of x and of values.
__device__ __forceinline__ int x_at(int row, int c) { return row * 128 + ((c ^ (row & 7)) << 4); }
__device__ __forceinline__ int values_at(int row, int c) {
  return VALUES_AT + row * CHUNKS * 16 + ((c ^ (row * CHUNKS / 8 & (CHUNKS - 1))) << 4);
}

// From the block's first row and output on, so that offsets in it fit 32 bits.
struct Operands {
  const char* values;
  const char* positions;
  const char* scales;  // of all outputs
  const char* x;
  int rows, out, inputs, first_output;
};

// Which of the scales, in order of memory, an output of a step has.
__device__ __forceinline__ u64 scale_index(const Operands& of, int output, int step) {
  const int groups = (of.inputs >> 6) / (PER_SCALE + !PER_SCALE);
  return (u64)(of.first_output + min(output, of.out - 1)) * groups + step / (PER_SCALE + !PER_SCALE);
}

// A step into a slot.
__device__ __forceinline__ void fetch_step(char* slot, const Operands& of, int step, int thread) {
  const u32 blocks = of.inputs >> 6;  // of 64 inputs
  const char* const x = of.x + (u64)step * 128;
  const char* const values = of.values + (u64)step * (CHUNKS * 16);
  const char* const positions = of.positions + (u64)step * 8;
#pragma unroll
  for (int u = 0; u < (ROWS * 8 + THREADS - 1) / THREADS; u++) {
    const int i = thread + u * THREADS, n = i >> 3, c = i & 7;
    if (ROWS * 8 % THREADS && n >= ROWS) break;
    copy16(slot + x_at(n, c), x + (u32)(min(n, of.rows - 1) * blocks * 128 + c * 16), n < of.rows);
  }
#pragma unroll
  for (int u = 0; u < (OUTPUTS * CHUNKS + THREADS - 1) / THREADS; u++) {
    const int i = thread + u * THREADS, o = i / CHUNKS, c = i % CHUNKS;
    if (OUTPUTS * CHUNKS % THREADS && o >= OUTPUTS) break;
    copy16(slot + values_at(o, c), values + (u32)(min(o, of.out - 1) * blocks * (CHUNKS * 16) + c * 16), true);
  }
#pragma unroll
  for (int u = 0; u < (OUTPUTS + THREADS - 1) / THREADS; u++) {
    const int o = thread + u * THREADS;
    if (OUTPUTS % THREADS && o >= OUTPUTS) break;
    copy8(slot + POSITIONS_AT + o * 8, positions + (u32)(min(o, of.out - 1) * blocks * 8));
    // Two scales, of which one is meant: four bytes are the least that can be copied.
    if (PER_SCALE) copy4(slot + SCALES_AT + o * 4, of.scales + (scale_index(of, o, step) & ~(u64)1) * 2);
  }
}

// Kept values of 16 outputs and the 32 inputs of an mma, as it takes them.
__device__ __forceinline__ uint4 take_values(const char* slot, int output, int half, int lane) {
#if KEPT == 16
  return load_matrices(slot + values_at(output + (lane & 15), 2 * half + (lane >> 4)));
#else
  const int g = lane >> 2, t = lane & 3;
  uint4 v;
#pragma unroll
  for (int k = 0; k < 4; k++) {  // rows g and g + 8, then both eight values on
    const int row = output + g + 8 * (k & 1);
#if KEPT == 8
    const u32 pair = decode(from_shared<u16>(slot + values_at(row, half) + 2 * t + (k >> 1) * 8), false);
#else
    const u32 pair = decode4(from_shared<unsigned char>(slot + values_at(row, 0) + half * 8 + t + (k >> 1) * 4));
#endif
    (k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w) = pair;
  }
  return v;
#endif
}

__device__ __forceinline__ void multiply_step(float4 (&c)[WM][NT], const char* slot, const Operands& of, int row,
                                              int output, int step, int lane) {
  const int g = lane >> 2, t = lane & 3;
  u32 e[WM];
  u16 scale[WM][2];
#pragma unroll
  for (int m = 0; m < WM; m++) {
    const int o = output + 16 * m + g;
    const char* places = slot + POSITIONS_AT + o * 8 + (t >> 1) * 4;
    e[m] = __byte_perm(from_shared<u32>(places), from_shared<u32>(places + 64), t & 1 ? 0x7632 : 0x5410);
    if (PER_SCALE)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 pair = from_shared<u32>(slot + SCALES_AT + (o + 8 * half) * 4);
        scale[m][half] = scale_index(of, o + 8 * half, step) & 1 ? pair >> 16 : pair & 0xFFFFu;
      }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4 a[WM];
#pragma unroll
    for (int m = 0; m < WM; m++) {
      a[m] = take_values(slot, output + 16 * m, half, lane);
      if (PER_SCALE)
        a[m] = make_uint4(scaled(a[m].x, scale[m][0]), scaled(a[m].y, scale[m][1]), scaled(a[m].z, scale[m][0]),
                          scaled(a[m].w, scale[m][1]));
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const uint4 b = load_matrices(slot + x_at(row + 8 * n + (lane & 7), 4 * half + (lane >> 3)));
#pragma unroll
      for (int m = 0; m < WM; m++) {
        if (half)
          mma<1>(c[m][n], a[m].x, a[m].y, a[m].z, a[m].w, b, e[m]);
        else
          mma<0>(c[m][n], a[m].x, a[m].y, a[m].z, a[m].w, b, e[m]);
      }
    }
  }
}

// Dynamic shared memory: STAGES slots. `part`: (gridDim.y, rows, out), or none with one part.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    staged24(const char* __restrict__ values, const char* __restrict__ positions, const u16* MADE_AHEAD x,
             const Scale* __restrict__ scale, const u16* __restrict__ bias, u16* __restrict__ y,
             float* MADE_AHEAD part, int rows, int out, int inputs) {
  SHARED_MEMORY
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int row_blocks = (rows + ROWS - 1) / ROWS;
  const int row = blockIdx.x % row_blocks * ROWS, output = blockIdx.x / row_blocks * OUTPUTS;  // of the block
  const int warp_row = warp % WR * (8 * NT), warp_output = warp / WR * (16 * WM);              // in the block
  const int all = inputs >> 6, each = (all + gridDim.y - 1) / gridDim.y, first = blockIdx.y * each;
  const int steps = max(0, min(each, all - first));
  const Operands of = {values + (u64)output * (inputs >> 6) * (CHUNKS * 16), positions + (u64)output * (inputs >> 3),
                       (const char*)scale, (const char*)(x + (u64)row * inputs), rows - row, out - output, inputs, output};

  // A group of copies for each step, also for those behind the last: the number of groups tells which have arrived.
  auto fetch_ahead = [&](int step) {
    if (step < steps) fetch_step(shared + step % STAGES * STAGE, of, first + step, thread);
    commit();
  };
  after_kernels_ahead();
#pragma unroll
  for (int step = 0; step < STAGES - 1; step++) fetch_ahead(step);

  float4 c[WM][NT];
#pragma unroll
  for (int m = 0; m < WM; m++)
#pragma unroll
    for (int n = 0; n < NT; n++) c[m][n] = make_float4(0, 0, 0, 0);

#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    arrived<STAGES - 2>();
    __syncthreads();  // the step is there for all warps, and none reads the slot that is filled next
    fetch_ahead(step + STAGES - 1);
    multiply_step(c, shared + step % STAGES * STAGE, of, warp_row, warp_output, first + step, lane);
  }

  float* part_of_block = part ? part + (u64)blockIdx.y * rows * out : part;
  const Target to = {PER_SCALE ? nullptr : scale, bias, y, part_of_block, rows, out};
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < WM; m++)
#pragma unroll
    for (int n = 0; n < NT; n++) store4(to, c[m][n], row + warp_row + 8 * n + 2 * t, output + warp_output + 16 * m + g);
}
