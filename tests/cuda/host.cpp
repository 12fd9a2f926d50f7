// Runs kernels on the host; see host.h. Always compiled without sanitizers.
#include "costs.h"
#include "history.h"
#include <random>
#include <sys/mman.h>

Dim threadIdx, blockIdx, blockDim, gridDim;

// Saves callee-saved registers and switches stacks. (ucontext would need two system calls; `ret` would be predicted as
// the end of another call.)
#ifdef __x86_64__
extern "C" void host_switch(void **save, void *to);
asm(R"(.text
.globl host_switch
host_switch:
 pushq %rbp
 pushq %rbx
 pushq %r12
 pushq %r13
 pushq %r14
 pushq %r15
 movq %rsp,(%rdi)
 movq %rsi,%rsp
 popq %r15
 popq %r14
 popq %r13
 popq %r12
 popq %rbx
 popq %rbp
 popq %rcx
 jmp *%rcx
)");
#else
#error "kernels run on the host of x86-64 only"
#endif

namespace host {

namespace {

constexpr size_t PAGE = 4096, STACK = 256 << 10;

struct Copy {
  void *to;
  const void *from;
  bool some;
};

struct Fiber {
  void *sp = nullptr;
  Meet meet;
  // copies by cp.async, and the end of each group; those before `head` and `first` are delivered
  std::vector<Copy> copies;
  std::vector<size_t> groups;
  size_t head = 0, first = 0;
  unsigned warp_epoch = 1;
};

constexpr size_t ARENA = 256 << 10;
unsigned char *arena;
History<OfShared> shared_history(ARENA);
size_t dynamic_bytes, used;
std::map<const void *, std::pair<size_t, size_t>> statics; // by key: offset, bytes

Regions buffers;
std::vector<Fiber> fibers;
unsigned char *stacks;
size_t stack_count;
void *scheduler;
const std::function<void()> *body;
const char *name = "no kernel";
unsigned current, epoch, launches, blocks;
bool in_kernel, counted; // counted: whether loads and stores call back
std::mt19937 random_(1);
Requests requests;
Counts *costs;

bool is_shared(const void *p) { return p >= arena && p < arena + ARENA; }

const auto shared_address = [](uintptr_t p) { return is_shared(reinterpret_cast<void *>(p)); };

bool exists(size_t at, size_t n) {
  if (at + n <= dynamic_bytes) return true;
  for (const auto &[key, place] : statics)
    if (at >= place.first && at + n <= place.first + place.second) return true;
  return false;
}

void touch_shared(size_t at, size_t n, bool write) {
  if (!exists(at, n)) fail("beyond shared memory");
  const Who who = {current, epoch, fibers[current].warp_epoch};
  shared_history.each(at, n, blocks, [&](OfShared &s, size_t i) { touch(s, i, who, write, counted); });
}

bool touch_global(uintptr_t p, size_t n, bool write) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  return buffers.touch(p, n, write, block, launches);
}

void note(const void *p, size_t n, const void *at) {
  if (counted) requests.note(current, reinterpret_cast<uintptr_t>(p), n, at, shared_address, *costs);
}

void entry() {
  (*body)();
  meet({Op::Done});
  abort();
}

// Values of 16 bits, as f64.
struct Values {
  double bf16[1 << 16], f16[1 << 16];
  Values() {
    for (uint32_t bits = 0; bits < 1 << 16; bits++) {
      __half h;
      const uint16_t b = static_cast<uint16_t>(bits);
      memcpy(&h, &b, 2);
      bf16[bits] = static_cast<double>(__uint_as_float(bits << 16)), f16[bits] = static_cast<double>(__half2float(h));
    }
  }
};

void multiply(unsigned first) {
  static const Values values;
  typedef double Columns __attribute__((vector_size(64)));
  costs->mma++;
  double a[16][16];
  Columns b[16];
  const bool half = fibers[first].meet.kind;
  const double *const value = half ? values.f16 : values.bf16;
  for (unsigned l = 0; l < 32; l++) {
    const Meet &m = fibers[first + l].meet;
    if ((m.kind != 0) != half) fail("lanes multiply different types");
    const uint32_t *ra = static_cast<const uint32_t *>(m.a), *rb = static_cast<const uint32_t *>(m.b);
    const unsigned g = l / 4, t = l % 4;
    for (unsigned h = 0; h < 2; h++) {
      const auto part = [&](uint32_t r) { return value[r >> 16 * h & 0xffff]; };
      a[g][2 * t + h] = part(ra[0]), a[g + 8][2 * t + h] = part(ra[1]);
      a[g][2 * t + 8 + h] = part(ra[2]), a[g + 8][2 * t + 8 + h] = part(ra[3]);
      b[2 * t + h][g] = part(rb[0]), b[2 * t + 8 + h][g] = part(rb[1]);
    }
  }
  Columns sums[16];
  for (unsigned row = 0; row < 16; row++) {
    Columns sum = {};
    for (unsigned k = 0; k < 16; k++) sum += a[row][k] * b[k];
    sums[row] = sum;
  }
  for (unsigned l = 0; l < 32; l++) {
    float *d = static_cast<float *>(fibers[first + l].meet.out);
    for (unsigned i = 0; i < 4; i++) d[i] = static_cast<float>(d[i] + sums[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2]);
  }
}

void multiply_tf32(unsigned first) {
  costs->mma++;
  double a[16][8], b[8][8];
  const auto value = [](uint32_t bits) {
    const float x = __uint_as_float(bits);
    if (x == x && (bits & 0x1fff)) fail("an operand of tf32 that is not rounded");
    return static_cast<double>(x);
  };
  for (unsigned l = 0; l < 32; l++) {
    const Meet &m = fibers[first + l].meet;
    const uint32_t *ra = static_cast<const uint32_t *>(m.a), *rb = static_cast<const uint32_t *>(m.b);
    const unsigned g = l / 4, t = l % 4;
    for (unsigned i = 0; i < 4; i++) a[g + i % 2 * 8][t + i / 2 * 4] = value(ra[i]);
    for (unsigned i = 0; i < 2; i++) b[t + i * 4][g] = value(rb[i]);
  }
  for (unsigned l = 0; l < 32; l++) {
    float *d = static_cast<float *>(fibers[first + l].meet.out);
    for (unsigned i = 0; i < 4; i++) {
      double sum = d[i];
      for (unsigned k = 0; k < 8; k++) sum += a[l / 4 + i / 2 * 8][k] * b[k][l % 4 * 2 + i % 2];
      d[i] = static_cast<float>(sum);
    }
  }
}

void load_matrices(unsigned first, bool transposed) {
  for (unsigned x = 0; x < 4; x++) {
    const unsigned char *row[8];
    unsigned groups[8] = {};
    for (unsigned i = 0; i < 8; i++) {
      current = first + x * 8 + i;
      row[i] = static_cast<const unsigned char *>(fibers[current].meet.a);
      if (reinterpret_cast<uintptr_t>(row[i]) % 16) fail("ldmatrix from an address that is no multiple of 16");
      if (!is_shared(row[i])) fail("ldmatrix from elsewhere than shared memory");
      touch_shared(static_cast<size_t>(row[i] - arena), 16, false);
      if (std::find(row, row + i, row[i]) == row + i) groups[(row[i] - arena) / 16 % 8]++;
    }
    costs->phases++, costs->passes += *std::max_element(groups, groups + 8);
    for (unsigned l = 0; l < 32; l++) {
      uint16_t v[2];
      for (unsigned h = 0; h < 2; h++) {
        const unsigned r = transposed ? l % 4 * 2 + h : l / 4, col = transposed ? l / 4 : l % 4 * 2 + h;
        memcpy(&v[h], row[r] + 2 * col, 2);
      }
      static_cast<uint32_t *>(fibers[first + l].meet.out)[x] = v[0] | static_cast<uint32_t>(v[1]) << 16;
    }
  }
}

// Completes a warp operation once all lanes have arrived.
void exchange(unsigned first) {
  const Meet &m0 = fibers[first].meet;
  switch (m0.op) {
  case Op::SyncWarp:
    for (unsigned i = first; i < first + 32; i++) fibers[i].warp_epoch++;
    break;
  case Op::Shuffle:
    for (unsigned l = 0; l < 32; l++) {
      current = first + l;
      const Meet &m = fibers[current].meet;
      if (m.kind != m0.kind || m.width != m0.width) fail("lanes wait in different shuffles");
      const int lane = static_cast<int>(l), base = lane / m.width * m.width;
      int from = lane;
      switch (static_cast<Lane>(m.kind)) {
      case Lane::Index:
        from = base + (m.argument & (m.width - 1));
        break;
      case Lane::Xor:
        from = lane ^ m.argument;
        break;
      case Lane::Up:
        from = lane - m.argument < base ? lane : lane - m.argument;
        break;
      case Lane::Down:
        from = lane + m.argument >= base + m.width ? lane : lane + m.argument;
        break;
      }
      if (from < 0 || from > 31) fail("a shuffle from no lane");
      *static_cast<uint32_t *>(m.out) = fibers[first + static_cast<unsigned>(from)].meet.value;
    }
    break;
  case Op::Vote: {
    uint32_t bits = 0;
    for (unsigned l = 0; l < 32; l++) bits |= static_cast<uint32_t>(fibers[first + l].meet.value != 0) << l;
    for (unsigned l = 0; l < 32; l++) *static_cast<uint32_t *>(fibers[first + l].meet.out) = bits;
    break;
  }
  case Op::Mma:
    multiply(first);
    break;
  case Op::MmaTf32:
    multiply_tf32(first);
    break;
  case Op::Load:
    load_matrices(first, false);
    break;
  case Op::LoadTransposed:
    load_matrices(first, true);
    break;
  default:
    fail("nothing to wait for");
  }
}

void resume(unsigned i) {
  current = threadIdx.x = i;
  in_kernel = true;
  host_switch(&scheduler, fibers[i].sp);
  in_kernel = false;
}

// Runs a warp until all lanes are at a barrier or done.
Op run_warp(unsigned first) {
  for (;;) {
    const unsigned turn = random_() % 32;
    for (unsigned l = 0; l < 32; l++) {
      const unsigned i = first + (l + turn) % 32;
      if (fibers[i].meet.op == Op::None) resume(i);
    }
    const Op op = fibers[first].meet.op;
    for (unsigned i = first; i < first + 32; i++) {
      current = i;
      if (fibers[i].meet.op != op) fail("lanes of a warp wait for different things");
    }
    if (op == Op::Barrier || op == Op::Done) return op;
    exchange(first);
    for (unsigned i = first; i < first + 32; i++) fibers[i].meet.op = Op::None;
  }
}

void run_block(unsigned threads) {
  blocks++;
  memset(arena, 0xff, used);
  used = (dynamic_bytes + 255) / 128 * 128;
  statics.clear();
  epoch = 1;
  for (unsigned i = 0; i < threads; i++) {
    Fiber &f = fibers[i];
    f.meet = Meet{}, f.warp_epoch = 1;
    f.copies.clear(), f.groups.clear(), f.head = f.first = 0;
    // tops of stacks in different sets of a cache
    void **sp = reinterpret_cast<void **>(stacks + (i + 1) * STACK - i % 64 * 17 * 64);
    *--sp = nullptr;
    *--sp = reinterpret_cast<void *>(&entry);
    for (int r = 0; r < 6; r++) *--sp = nullptr;
    f.sp = sp;
  }
  std::vector<unsigned> warps(threads / 32);
  for (unsigned i = 0; i < warps.size(); i++) warps[i] = i;
  for (;;) {
    std::shuffle(warps.begin(), warps.end(), random_);
    unsigned done = 0;
    for (unsigned w : warps) done += run_warp(w * 32) == Op::Done;
    if (done == warps.size()) break;
    if (done) fail("warps are done while others wait at a barrier");
    epoch++;
    for (Fiber &f : fibers) f.meet.op = Op::None;
  }
  if (counted) requests.end(shared_address, *costs);
}

} // namespace

std::map<std::string, Kernel> &kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

std::map<std::string, Counts> &counts() {
  static std::map<std::string, Counts> all;
  return all;
}

void forget() { counts().clear(); }

void seed(unsigned n) { random_.seed(n); }

void fail(const std::string &why) {
  fprintf(stderr, "%s, block (%u, %u, %u), thread %u: %s\n", name, blockIdx.x, blockIdx.y, blockIdx.z, current,
          why.c_str());
  fflush(stderr);
  _Exit(3);
}

void meet(const Meet &m) {
  Fiber &f = fibers[current];
  f.meet = m;
  host_switch(&f.sp, scheduler);
}

unsigned char *dynamic_shared() { return arena; }

void *static_shared(const void *key, size_t bytes) {
  auto [at, fresh] = statics.insert({key, {used, bytes}});
  if (fresh) {
    if (used + bytes + 256 > ARENA) fail("too much shared memory");
    memset(arena + used, 0xff, bytes);
    // the gap afterwards is not shared memory
    used = (used + bytes + 255) / 128 * 128;
  }
  return arena + at->second.first;
}

void access(const void *p, size_t n, bool write, const void *at) {
  if (!in_kernel) return;
  in_kernel = false;
  if (is_shared(p)) {
    touch_shared(static_cast<size_t>(static_cast<const unsigned char *>(p) - arena), n, write);
    note(p, n, at);
  } else if (touch_global(reinterpret_cast<uintptr_t>(p), n, write)) {
    note(p, n, at);
  }
  in_kernel = true;
}

void cp_async(void *to, const void *from, bool some) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || (some && reinterpret_cast<uintptr_t>(from) % 16))
    fail("cp.async with an address that is no multiple of 16");
  if (!is_shared(to)) fail("cp.async to elsewhere than shared memory");
  const size_t at = static_cast<size_t>(static_cast<unsigned char *>(to) - arena);
  in_kernel = false;
  touch_shared(at, 16, true);
  note(to, 16, __builtin_return_address(0));
  if (some) {
    touch_global(reinterpret_cast<uintptr_t>(from), 16, false);
  }
  // record lanes without a read too, to keep the lanes' requests aligned
  note(from, some ? 16 : 0, static_cast<const char *>(__builtin_return_address(0)) + 1);
  // NaN until the copy is complete
  memset(to, 0xff, 16);
  shared_history.each(at, 16, blocks, [](OfShared &s, size_t) { s.pending = true; });
  fibers[current].copies.push_back({to, from, some});
  in_kernel = true;
}

void cp_async_commit() {
  Fiber &f = fibers[current];
  f.groups.push_back(f.copies.size());
}

void cp_async_wait(int left) {
  Fiber &f = fibers[current];
  in_kernel = false;
  for (; static_cast<int>(f.groups.size() - f.first) > left; f.first++)
    for (; f.head < f.groups[f.first]; f.head++) {
      const Copy &c = f.copies[f.head];
      const size_t at = static_cast<size_t>(static_cast<unsigned char *>(c.to) - arena);
      shared_history.each(at, 16, blocks, [](OfShared &s, size_t) { s.pending = false; });
      // a write by this thread, now: other threads need a barrier
      touch_shared(at, 16, true);
      if (c.some) memcpy(c.to, c.from, 16);
      else memset(c.to, 0, 16);
    }
  if (f.head == f.copies.size()) f.copies.clear(), f.groups.clear(), f.head = f.first = 0;
  in_kernel = true;
}

void *allocate(size_t bytes, size_t skew) {
  // place the last value at the end of the allocation, for AddressSanitizer
  void *memory = nullptr;
  if (posix_memalign(&memory, 128, bytes + skew)) abort();
  unsigned char *p = static_cast<unsigned char *>(memory);
  memset(p, 0xff, bytes + skew);
  buffers.add(reinterpret_cast<uintptr_t>(p + skew), bytes);
  return p + skew;
}

void release(void *p, size_t skew) {
  buffers.remove(reinterpret_cast<uintptr_t>(p));
  free(static_cast<unsigned char *>(p) - skew);
}

void launch(const char *kernel, Dim grid, unsigned threads, size_t shared_bytes, const std::function<void()> &f) {
  name = kernel;
  current = 0;
  if (threads == 0 || threads % 32 || threads > 1024) fail("a block of " + std::to_string(threads) + " threads");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) fail("a launch of no block");
  if (grid.y > 65535 || grid.z > 65535) fail("too many blocks");
  if (kernels().count(kernel) && threads > kernels().at(kernel).threads) fail("more threads than the kernel's bounds");
  // pairs of dk and dv run on cards with more
  if (shared_bytes > (std::string(kernel).find("_kv_pair_") == std::string::npos ? 99u : 163u + 64u) << 10)
    fail("more shared memory than a block of a card of 48 GB has");
  if (!arena) {
    arena = static_cast<unsigned char *>(aligned_alloc(128, ARENA));
    used = ARENA;
  }
  if (stack_count < threads) {
    if (stacks) munmap(stacks, stack_count * STACK);
    void *p =
        mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("no memory for stacks");
    stacks = static_cast<unsigned char *>(p), stack_count = threads;
    for (unsigned i = 0; i < threads; i++) mprotect(stacks + i * STACK, PAGE, PROT_NONE);
  }
  fibers.resize(threads);
  body = &f;
  blockDim = {threads, 1, 1}, gridDim = grid;
  dynamic_bytes = shared_bytes;
  launches++;
  costs = &counts()[kernel];
  costs->launches++;
  requests.begin(threads);
  for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) run_block(threads);
}

void launch(const char *kernel, Dim grid, unsigned threads, size_t shared_bytes, void **arguments) {
  const Kernel &k = kernels().at(kernel);
  launch(kernel, grid, threads, shared_bytes, [&] { k.call(arguments); });
}

} // namespace host

// Callbacks that -fsanitize=thread inserts before loads and stores; most are of a thread's stack.
extern "C" {
#define CALLBACK(WRITE, N)                                                                                             \
  if (static_cast<size_t>(static_cast<unsigned char *>(p) - host::stacks) >= host::stack_count * host::STACK)          \
    host::access(p, N, WRITE, __builtin_return_address(0));
#define ACCESS(SIZE)                                                                                                   \
  void __tsan_read##SIZE(void *p) { CALLBACK(false, SIZE) }                                                            \
  void __tsan_write##SIZE(void *p) { CALLBACK(true, SIZE) }                                                            \
  void __tsan_unaligned_read##SIZE(void *p) { CALLBACK(false, SIZE) }                                                  \
  void __tsan_unaligned_write##SIZE(void *p) { CALLBACK(true, SIZE) }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16) void __tsan_read_range(void *p, unsigned long n) {
  CALLBACK(false, n)
}
void __tsan_write_range(void *p, unsigned long n) { CALLBACK(true, n) }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() { host::counted = true; }
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
}
