// Costs of memory accesses, for host.cpp: an instruction of a warp is one request of its 32 lanes.
#pragma once
#include "host.h"
#include <algorithm>

namespace host {

// The n-th execution of an instruction by the lanes of a warp.
struct Request {
  unsigned lanes = 0; // bits
  unsigned bytes[32];
  uintptr_t at[32];
  Request() {}
};

// A phase serves as many lanes as fill 128 bytes; lanes with one address share it.
inline void add_shared(const Request &r, unsigned first, Counts &c) {
  static std::vector<uintptr_t> words;
  const unsigned together = 128 / std::max(4u, r.bytes[first]);
  for (unsigned phase = 0; phase < 32; phase += together) {
    words.clear();
    for (unsigned l = phase; l < std::min(32u, phase + together); l++)
      if (r.lanes >> l & 1)
        for (uintptr_t word = r.at[l] / 4; word * 4 < r.at[l] + r.bytes[l]; word++) words.push_back(word);
    if (words.empty()) continue;
    if (!std::is_sorted(words.begin(), words.end())) std::sort(words.begin(), words.end());
    unsigned passes[32] = {}, most = 1;
    for (size_t i = 0; i < words.size(); i++)
      if (i == 0 || words[i] != words[i - 1]) most = std::max(most, ++passes[words[i] % 32]);
    c.phases++, c.passes += most;
  }
}

inline void add_global(const Request &r, Counts &c) {
  std::pair<uintptr_t, unsigned> by_address[32];
  unsigned n = 0;
  for (unsigned l = 0; l < 32; l++) {
    if (!(r.lanes >> l & 1) || r.bytes[l] == 0) continue;
    unsigned i = n++;
    for (; i > 0 && by_address[i - 1].first > r.at[l]; i--) by_address[i] = by_address[i - 1];
    by_address[i] = {r.at[l], r.bytes[l]};
  }
  uintptr_t bytes = 0, sectors = 0; // what is counted ends here
  for (unsigned i = 0; i < n; i++) {
    const uintptr_t from = by_address[i].first, to = from + by_address[i].second;
    const uintptr_t sector = std::max(sectors, from / 32), end = std::max(sectors, (to + 31) / 32);
    c.asked += std::max(bytes, to) - std::max(bytes, from), c.sectors += end - sector;
    bytes = std::max(bytes, to), sectors = end;
  }
}

// The requests of a block that not all lanes have made.
class Requests {
  struct Site {
    std::vector<Request> open;
    unsigned done = 0, complete = 0; // requests before `open`, and complete ones in it
  };
  struct Warp {
    std::vector<Site> sites;
    std::vector<unsigned> times[32]; // executions by each lane
  };
  std::vector<Warp> warps;

  // Numbers of the instructions, an open hash table.
  std::vector<std::pair<const void *, unsigned>> table{1024};
  unsigned instructions = 0;

  auto &place(const void *at) {
    size_t i = reinterpret_cast<uintptr_t>(at) * 0x9e3779b97f4a7c15u >> 32;
    while (table[i % table.size()].first && table[i % table.size()].first != at) i++;
    return table[i % table.size()];
  }

  unsigned number(const void *at) {
    auto *found = &place(at);
    if (found->first) return found->second;
    *found = {at, instructions++};
    if (instructions * 2 > table.size()) {
      std::vector<std::pair<const void *, unsigned>> old(table.size() * 2);
      old.swap(table);
      for (const auto &[at, number] : old)
        if (at) place(at) = {at, number};
    }
    return instructions - 1;
  }

public:
  // Before a launch of blocks of `threads`.
  void begin(unsigned threads) {
    std::fill(table.begin(), table.end(), std::pair<const void *, unsigned>{});
    instructions = 0;
    warps.resize(threads / 32);
  }

  // An access of a lane by the instruction `site`. `shared` tells shared memory from global.
  template <typename F> void note(unsigned thread, uintptr_t p, size_t n, const void *site, F shared, Counts &c) {
    const unsigned number = this->number(site), lane = thread % 32;
    Warp &w = warps[thread / 32];
    if (w.sites.size() <= number) w.sites.resize(number + 1);
    if (w.times[lane].size() <= number) w.times[lane].resize(number + 1);
    Site &s = w.sites[number];
    const unsigned time = w.times[lane][number]++ - s.done;
    if (s.open.size() <= time) s.open.resize(time + 1);
    Request &r = s.open[time];
    r.at[lane] = p, r.bytes[lane] = static_cast<unsigned>(n), r.lanes |= 1u << lane;
    if (r.lanes != ~0u) return;
    add(r, shared, c);
    if (++s.complete == s.open.size()) s.done += s.complete, s.complete = 0, s.open.clear();
  }

  template <typename F> void add(const Request &r, F shared, Counts &c) {
    const unsigned first = static_cast<unsigned>(__builtin_ctz(r.lanes));
    if (shared(r.at[first])) add_shared(r, first, c);
    else add_global(r, c);
  }

  // Adds up the requests that some lanes of a warp have not made, at the end of a block.
  template <typename F> void end(F shared, Counts &c) {
    for (Warp &w : warps) {
      for (Site &s : w.sites) {
        for (const Request &r : s.open)
          if (r.lanes != 0 && r.lanes != ~0u) add(r, shared, c);
        s.open.clear(), s.done = s.complete = 0;
      }
      for (auto &times : w.times) std::fill(times.begin(), times.end(), 0);
    }
  }
};

} // namespace host
