// Access histories of shared and global memory, for host.cpp: accesses that conflict end the program.
#pragma once
#include "host.h"
#include <algorithm>
#include <memory>

namespace host {

constexpr unsigned NOBODY = ~0u;

// States of memory, by bytes. The bytes of a line of 16 have one state until an access takes a part of them; then each
// quarter has its own, then each byte. A state is new in the first access of a time (a launch, a block).
template <typename State> class History {
  static constexpr size_t LINE = 16;
  struct Line {
    unsigned time = 0, grain = LINE;
    State whole;
  };
  std::vector<Line> lines;
  std::vector<State> parts; // of each line: 4 or 16

  void split(size_t line) {
    if (parts.empty()) parts.resize(lines.size() * LINE);
    State *const of = &parts[line * LINE];
    if (lines[line].grain == LINE) std::fill(of, of + 4, lines[line].whole);
    else
      for (size_t i = LINE; i-- > 0;) of[i] = of[i / 4];
    lines[line].grain /= 4;
  }

public:
  explicit History(size_t bytes) : lines((bytes + LINE - 1) / LINE) {}

  // Calls `f` with the states of `n` bytes from `at`, and the first byte of each.
  template <typename F> void each(size_t at, size_t n, unsigned time, F f) {
    for (size_t i = at; i < at + n;) {
      Line &line = lines[i / LINE];
      if (line.time != time) line = {time, LINE, State{}};
      while (i % line.grain || at + n - i < line.grain) split(i / LINE);
      f(line.grain == LINE ? line.whole : parts[i / LINE * LINE + i % LINE / line.grain], i);
      i += line.grain;
    }
  }
};

// Accesses of a block to shared memory. Epochs count barriers; warp epochs count __syncwarp.
struct OfShared {
  unsigned writer = NOBODY, write_epoch = 0, write_warp_epoch = 0;
  unsigned read_epoch = 0, read_warp_epoch = 0, warps = 0, lanes = 0, reader = NOBODY;
  bool written = false, pending = false;
};

// A thread that accesses shared memory.
struct Who {
  unsigned thread, epoch, warp_epoch;
};

inline void race(const char *what, size_t at, unsigned other) {
  fail(std::string(what) + " at shared byte " + std::to_string(at) + ", with thread " + std::to_string(other) +
       ", no barrier between");
}

// `all`: whether every access is recorded, those of single values too.
inline void touch(OfShared &s, size_t i, const Who &who, bool write, bool all) {
  const unsigned t = who.thread, w = t / 32, lane = 1u << t % 32;
  if (s.pending) fail("a byte of shared memory that cp.async has not delivered");
  if (all && !write && !s.written) fail("a byte of shared memory that nothing has written");
  const bool ordered = s.writer / 32 == w && who.warp_epoch > s.write_warp_epoch;
  if (s.writer != NOBODY && s.writer != t && s.write_epoch == who.epoch && !ordered)
    race(write ? "write after write" : "read after write", i, s.writer);
  if (write) {
    if (s.read_epoch == who.epoch) {
      if (s.warps & ~(1u << w)) race("write after another warp's read", i, s.reader);
      if ((s.lanes & ~lane) && who.warp_epoch <= s.read_warp_epoch) race("write after read", i, s.reader);
    }
    s.writer = t, s.write_epoch = who.epoch, s.write_warp_epoch = who.warp_epoch, s.written = true;
  } else {
    if (s.read_epoch != who.epoch) s.warps = 0, s.lanes = 0;
    if (s.read_warp_epoch != who.warp_epoch || s.reader / 32 != w) s.lanes = 0;
    s.read_epoch = who.epoch, s.read_warp_epoch = who.warp_epoch, s.warps |= 1u << w, s.lanes |= lane, s.reader = t;
  }
}

// Blocks that access global memory in a launch.
struct OfGlobal {
  unsigned writer = NOBODY, reader = NOBODY;
};

// The Buffers.
class Regions {
  struct Region {
    uintptr_t begin, end;
    History<OfGlobal> history;
  };
  std::vector<std::unique_ptr<Region>> all; // by address
  Region *last = nullptr;

  auto after(uintptr_t p) {
    return std::upper_bound(all.begin(), all.end(), p, [](uintptr_t p, const auto &r) { return p < r->begin; });
  }

  Region *find(uintptr_t p) {
    if (last && p - last->begin < last->end - last->begin) return last;
    if (all.empty() || p < all.front()->begin || p >= all.back()->end) return nullptr;
    Region *const r = std::prev(after(p))->get();
    return p < r->end ? last = r : nullptr;
  }

public:
  void add(uintptr_t p, size_t bytes) { all.emplace(after(p), new Region{p, p + bytes, History<OfGlobal>(bytes)}); }

  void remove(uintptr_t p) {
    last = nullptr;
    all.erase(std::prev(after(p)));
  }

  // An access of a block to `n` bytes; false if they are not in a Buffer.
  bool touch(uintptr_t p, size_t n, bool write, unsigned block, unsigned launch) {
    Region *const r = find(p);
    if (!r) return false;
    r->history.each(p - r->begin, std::min(n, r->end - p), launch, [&](OfGlobal &s, size_t) {
      if (s.writer != NOBODY && s.writer != block)
        fail("global memory that block " + std::to_string(s.writer) + " has written in this launch");
      if (write && s.reader != NOBODY && s.reader != block)
        fail("writes global memory that block " + std::to_string(s.reader) + " has read in this launch");
      (write ? s.writer : s.reader) = block;
    });
    return true;
  }
};

} // namespace host
