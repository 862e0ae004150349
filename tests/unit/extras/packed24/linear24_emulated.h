// What linear24.cu needs of CUDA, on the host: lanes are fibers of one thread, which take turns at barriers, and mma.sp
// is written out as NVIDIA documents it. Copies to shared memory arrive when they are waited for, and not before. What
// from_shared and load_matrices read must have arrived, behind a barrier if another lane has copied it, and nothing is
// copied to where another lane has read since the last barrier. What is copied lies in an operand, whole. emulated::race is
// the first that does not hold.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define EMULATED
static inline void after_kernels_ahead() {}
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define SHARED_MEMORY char* const shared = emulated::memory;
using std::max;
using std::min;

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Place { unsigned x, y; };
inline Place threadIdx, blockIdx, gridDim;

namespace emulated {
inline char* memory;
inline void require(bool holds, const char* what) {
  if (!holds) std::fprintf(stderr, "%s\n", what), std::abort();
}

struct Barrier {
  int size, waiting = 0, turn = 0;
};
struct Copy {
  char* to;
  const char* from;
  int size;
  bool there;  // or zeros
};
struct Operand {
  const void* begin;
  size_t size;
};
struct Access {
  int lane = -1, turn = -1;  // several lanes: -2
};
struct Word {
  Access written, read;
  int copies = 0;  // on their way
};
struct Lane {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  std::deque<std::vector<Copy>> groups{{}};  // the last is still open
  bool done = false;
};
struct Warp {
  Barrier barrier{32};
  unsigned a[32][4], b[32][4], e[32];
  const char* rows[32];
};
inline std::vector<std::unique_ptr<Lane>> lanes;
inline std::vector<Warp> warps;
inline Barrier block;
inline ucontext_t home;
inline std::function<void()> kernel;
inline std::vector<Word> words;  // of shared memory, four bytes each
inline const char* race;
inline std::vector<Operand> operands;  // that a kernel may copy from

inline Lane& lane() { return *lanes[threadIdx.x]; }
inline Warp& warp() { return warps[threadIdx.x / 32]; }
inline void wait(Barrier& barrier) {
  const int turn = barrier.turn;
  if (++barrier.waiting == barrier.size) barrier.waiting = 0, barrier.turn++;
  while (barrier.turn == turn) swapcontext(&lane().context, &home);
}
inline void forbid(bool happens, const char* what) {
  if (happens && !race) race = what;
}
inline bool by_another(const Access& access) {
  return access.turn == block.turn && access.lane != (int)threadIdx.x;
}
template <typename Action>
void each_word(const char* at, int size, Action action) {
  const size_t first = at - memory;
  for (size_t i = first / 4; i <= (first + size - 1) / 4; i++) action(words.at(i));
}
inline void note_read(const char* at, int size) {
  each_word(at, size, [](Word& word) {
    forbid(word.copies, "memory is read while a copy to it is on its way");
    forbid(by_another(word.written), "memory is read that another lane has copied, without a barrier");
    word.read = {by_another(word.read) ? -2 : (int)threadIdx.x, block.turn};
  });
}
inline void note_copy(const char* at, int size, bool arrives) {
  each_word(at, size, [=](Word& word) {
    word.copies += arrives ? -1 : 1;
    if (arrives) word.written = {(int)threadIdx.x, block.turn};
    forbid(!arrives && by_another(word.read), "memory is copied to that another lane has read, without a barrier");
  });
}
inline bool in_an_operand(const char* from, int size) {
  return std::any_of(operands.begin(), operands.end(), [=](const Operand& operand) {
    const uintptr_t begin = (uintptr_t)operand.begin;
    return (uintptr_t)from >= begin && (uintptr_t)from + size <= begin + operand.size;
  });
}
inline void begin() {
  kernel();
  lane().done = true;
  swapcontext(&lane().context, &home);
}

inline const char* run(std::function<void()> function, Place grid, int threads, int shared_memory,
                       std::vector<Operand> readable) {
  race = nullptr;
  operands = readable;
  kernel = function;
  gridDim = grid;
  std::unique_ptr<char, decltype(&std::free)> held{(char*)std::aligned_alloc(128, shared_memory / 128 * 128 + 256),
                                                  std::free};
  memory = held.get();
  for (unsigned i = 0; i < grid.x * grid.y; i++) {
    blockIdx = {i % grid.x, i / grid.x};
    std::memset(memory, 0xff, shared_memory + 128);  // NaN where nothing is written
    block = {threads};
    words.assign(shared_memory / 4, {});
    warps.assign(threads / 32, {});
    lanes.clear();
    for (int t = 0; t < threads; t++) {
      lanes.emplace_back(new Lane);
      Lane& lane = *lanes.back();
      getcontext(&lane.context);
      lane.context.uc_stack.ss_sp = lane.stack.data();
      lane.context.uc_stack.ss_size = lane.stack.size();
      makecontext(&lane.context, begin, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (int t = 0; t < threads; t++)
        if (!lanes[t]->done) threadIdx = {(unsigned)t, 0}, left = true, swapcontext(&home, &lanes[t]->context);
    }
    for (int at = 0; at < 128; at++) require(memory[shared_memory + at] == (char)0xff, "shared memory is overrun");
  }
  return race;
}

inline float bfloat16(unsigned bits) {
  bits <<= 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}
inline bool is_half;  // 16-bit numbers are fp16, not bf16
inline float number(unsigned bits) {
  if (!is_half) return bfloat16(bits);
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                                    : std::ldexp(mantissa + (exponent ? 1024 : 0), std::max(exponent, 1) - 25);
  return bits & 0x8000 ? -size : size;
}
}  // namespace emulated

inline void __syncthreads() { emulated::wait(emulated::block); }
inline unsigned __shfl_sync(unsigned, unsigned value, int from, int width) {
  auto& warp = emulated::warp();
  const int lane = threadIdx.x & 31;
  warp.e[lane] = value;
  emulated::wait(warp.barrier);
  const unsigned found = warp.e[(lane & ~(width - 1)) + from];
  emulated::wait(warp.barrier);
  return found;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = a | (uint64_t)b << 32;
  unsigned found = 0;
  for (int i = 0; i < 4; i++) found |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
inline float bf16_bits(unsigned short v) { return emulated::bfloat16(v); }
inline float wide(unsigned short v) { return emulated::number(v); }
inline unsigned short narrow(float v) {
  unsigned bits;
  std::memcpy(&bits, &v, 4);
  if (emulated::is_half) {
    const unsigned sign = bits >> 16 & 0x8000;
    if (std::isnan(v)) return 0x7e00;
    const int exponent = std::fabs(v) < 0x1p-14f ? -14 : std::min(std::ilogb(v), 16);
    const double steps = std::nearbyint(std::ldexp(std::fabs((double)v), 10 - exponent));
    return sign | (unsigned)std::min(steps + ((exponent + 14) << 10), 31744.0);
  }
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void copy(char* to, const char* from, int size, bool there) {
  emulated::require(((uintptr_t)from | (uintptr_t)(to - emulated::memory)) % size == 0, "a copy is not aligned");
  emulated::note_copy(to, size, false);
  const bool outside = there && !emulated::in_an_operand(from, size);
  emulated::forbid(outside, "memory outside the operands is copied");
  emulated::lane().groups.back().push_back({to, from, size, there && !outside});
}
inline void copy4(char* to, const char* from, bool there = true) { copy(to, from, 4, there); }
inline void copy16(char* to, const char* from, bool there) { copy(to, from, 16, there); }
inline void copy8(char* to, const char* from, bool there = true) { copy(to, from, 8, there); }
inline unsigned on_halves(unsigned a, unsigned b, float (*operation)(float, float)) {
  const unsigned low = narrow(operation(emulated::number(a & 0xffff), emulated::number(b & 0xffff)));
  return low | (unsigned)narrow(operation(emulated::number(a >> 16), emulated::number(b >> 16))) << 16;
}
inline unsigned minus(unsigned a, unsigned b) { return on_halves(a, b, [](float x, float y) { return x - y; }); }
inline unsigned times(unsigned a, unsigned b) { return on_halves(a, b, [](float x, float y) { return x * y; }); }
inline void commit() { emulated::lane().groups.emplace_back(); }
template <int LEFT>
void arrived() {
  auto& groups = emulated::lane().groups;
  for (; groups.size() > LEFT + 1; groups.pop_front())
    for (const auto& c : groups.front()) {
      c.there ? std::memcpy(c.to, c.from, c.size) : std::memset(c.to, 0, c.size);
      emulated::note_copy(c.to, c.size, true);
    }
}
template <typename T>
T from_shared(const char* at) {
  emulated::note_read(at, sizeof(T));
  return *(const T*)at;
}
// Four matrices, whose rows the lanes name; eight rows of a matrix are read at once, and must lie in different banks.
inline uint4 load_matrices(const char* row) {
  auto& warp = emulated::warp();
  const int lane = threadIdx.x & 31;
  warp.rows[lane] = row;
  emulated::wait(warp.barrier);
  unsigned found[4], banks = 0;
  for (int k = 0; k < 4; k++) {
    const char* word = warp.rows[8 * k + lane / 4] + lane % 4 * 4;
    emulated::note_read(word, 4);
    std::memcpy(&found[k], word, 4);
  }
  for (int other = lane & ~7; other <= (lane | 7); other++) banks |= 1 << (warp.rows[other] - emulated::memory) / 16 % 8;
  emulated::require(banks == 255 && (row - emulated::memory) % 16 == 0, "rows of a matrix lie in the same bank");
  emulated::wait(warp.barrier);
  return {found[0], found[1], found[2], found[3]};
}

// m16n8k32: A is 16 x 32 with two of four kept, in four words; B is 32 x 8. The metadata of the first (last) 16 inputs
// come from lanes 2 SELECTOR (+ 1) of a quad: row lane / 4 in the lower half, row lane / 4 + 8 in the upper one.
template <int SELECTOR>
void mma(float4& c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, uint4 b, unsigned e) {
  auto& warp = emulated::warp();
  const int lane = threadIdx.x & 31;
  const unsigned as[4] = {a0, a1, a2, a3}, bs[4] = {b.x, b.y, b.z, b.w};
  std::memcpy(warp.a[lane], as, 16);
  std::memcpy(warp.b[lane], bs, 16);
  warp.e[lane] = e;
  emulated::wait(warp.barrier);
  auto kept = [&](int row, int k) {
    return emulated::number(warp.a[(row & 7) * 4 + k % 8 / 2][(row >> 3) + 2 * (k >> 3)] >> 16 * (k & 1) & 0xffff);
  };
  auto input = [&](int k, int n) {
    return emulated::number(warp.b[n * 4 + k % 8 / 2][k / 8] >> 16 * (k & 1) & 0xffff);
  };
  auto sum = [&](int row, int n) {
    float found = 0;
    for (int p = 0; p < 8; p++) {
      const unsigned nibble = warp.e[(row & 7) * 4 + 2 * SELECTOR + (p >> 2)] >> (16 * (row >> 3) + 4 * (p & 3)) & 15;
      emulated::require(emulated::race || (nibble & 3) < nibble >> 2, "positions are not in order");
      found += kept(row, 2 * p) * input(4 * p + (nibble & 3), n) + kept(row, 2 * p + 1) * input(4 * p + (nibble >> 2), n);
    }
    return found;
  };
  const int g = lane >> 2, t = lane & 3;
  c.x += sum(g, 2 * t), c.y += sum(g, 2 * t + 1), c.z += sum(g + 8, 2 * t), c.w += sum(g + 8, 2 * t + 1);
  emulated::wait(warp.barrier);
}
