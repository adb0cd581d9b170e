// The stand-in's collectives, between processes of one machine, through a file of shared memory.
//
// Each rank lays a piece of its tensor into a slot of its own, all meet, each takes from the slots what it needs, all
// meet again, until nothing is left. Sums are taken in the order of ranks: every rank has the same bits.

#pragma once

#include <fcntl.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "memory.h"
#include "paddle/phi/backends/device_ext.h"

namespace stand_in {

constexpr size_t kRanks = 8, kPiece = 1 << 20;
constexpr auto kPatience = std::chrono::seconds(30);

// What the ranks of a group share. All call the same collective on the same count and type, or all fail.
struct Shared {
  std::atomic<uint32_t> arrived, turn, broken;
  char calls[kRanks][64];
  alignas(64) char slots[kRanks][kPiece];
};

inline C_Status failed(const char* what, const char* why) {
  std::fprintf(stderr, "stand_in: %s: %s\n", what, why);
  return C_ERROR;
}

inline size_t size_of(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    case UINT64: case INT64: case FLOAT64: case COMPLEX64: return 8;
    case COMPLEX128: return 16;
    default: return 0;
  }
}

class Group {
 public:
  Group(Shared* shared, size_t rank, size_t ranks) : shared_(shared), rank_(rank), ranks_(ranks) {}
  ~Group() { munmap(shared_, sizeof(Shared)); }

  // Waits for all ranks; false, where one of them failed or didn't come.
  bool meet() {
    uint32_t turn = shared_->turn;
    if (++shared_->arrived == ranks_) {
      shared_->arrived = 0;
      ++shared_->turn;
    }
    auto until = std::chrono::steady_clock::now() + kPatience;
    for (size_t tries = 0; shared_->turn == turn; ++tries) {
      if (std::chrono::steady_clock::now() > until) shared_->broken = 1;
      if (shared_->broken) return false;
      tries < 1000 ? sched_yield() : usleep(50);
    }
    return true;
  }

  // Runs a collective on ``count`` elements, piece by piece: ``send``, unless it is null, is what this rank gives;
  // ``take(first, elements)`` carries elements from the slots to where they belong.
  template <typename Take>
  C_Status run(const char* name, const void* send, size_t count, C_DataType type, size_t root, Take take) {
    size_t width = size_of(type), per_piece = width ? kPiece / width : 0;
    const char* source = send && width ? opened(send, count * width) : nullptr;
    if (!width || (send && !source)) {
      shared_->broken = 1;
      return failed(name, width ? "it was handed memory that isn't this device's" : "a type it doesn't have");
    }
    std::snprintf(shared_->calls[rank_], sizeof *shared_->calls, "%s of %zu x type %d, root %zu", name, count,
                  static_cast<int>(type), root);
    for (size_t first = 0; first == 0 || first < count; first += per_piece) {
      size_t elements = std::min(per_piece, count - first);
      if (source) std::memcpy(shared_->slots[rank_], source + first * width, elements * width);
      if (!meet()) return failed(name, "another rank failed, or didn't come");
      for (size_t other = 0; other < ranks_; ++other)
        if (std::strcmp(shared_->calls[other], shared_->calls[rank_]) != 0) {
          std::fprintf(stderr, "stand_in: rank %zu: %s; rank %zu: %s\n", rank_, shared_->calls[rank_], other,
                       shared_->calls[other]);
          return C_ERROR;
        }
      if (!take(first, elements)) {
        shared_->broken = 1;
        return failed(name, "its result's memory isn't this device's, or there is no such reduction of its type");
      }
      if (!meet()) return failed(name, "another rank failed, or didn't come");
    }
    return C_SUCCESS;
  }

  // Reduces the slots' elements from ``skip`` on into the device's memory at ``to``.
  bool reduce(void* to, size_t elements, C_DataType type, C_CCLReduceOp op, size_t skip = 0) const {
    char* target = opened(to, elements * size_of(type));
    if (!target) return false;
    switch (type) {
      case FLOAT32: return reduced<float>(target, elements, op, skip);
      case FLOAT64: return reduced<double>(target, elements, op, skip);
      case INT32: return reduced<int32_t>(target, elements, op, skip);
      case INT64: return reduced<int64_t>(target, elements, op, skip);
      case UINT8: return reduced<uint8_t>(target, elements, op, skip);
      default: return false;
    }
  }

  // Copies ``bytes`` of the slot of ``from`` into the device's memory at ``to``.
  bool copy(void* to, size_t from, size_t bytes) const {
    char* target = opened(to, bytes);
    if (target) std::memcpy(target, shared_->slots[from], bytes);
    return target;
  }

  size_t rank() const { return rank_; }
  size_t ranks() const { return ranks_; }

 private:
  template <typename T>
  bool reduced(char* target, size_t elements, C_CCLReduceOp op, size_t skip) const {
    auto* result = reinterpret_cast<T*>(target);
    for (size_t i = 0; i < elements; ++i) {
      T value = reinterpret_cast<const T*>(shared_->slots[0])[skip + i];
      for (size_t other = 1; other < ranks_; ++other) {
        T next = reinterpret_cast<const T*>(shared_->slots[other])[skip + i];
        if (op == SUM || op == AVG) value += next;
        else if (op == PRODUCT) value *= next;
        else value = op == MAX ? std::max(value, next) : std::min(value, next);
      }
      result[i] = op == AVG ? static_cast<T>(value / ranks_) : value;
    }
    return true;
  }

  Shared* shared_;
  size_t rank_, ranks_;
};

inline Group* group(C_CCLComm comm) { return reinterpret_cast<Group*>(comm); }

constexpr size_t kName = 64;

inline C_Status unique_id_size(size_t* size) { return *size = kName, C_SUCCESS; }

// The file's name. Once all ranks have it open, rank 0 removes it.
inline C_Status unique_id(C_CCLRootId* id) {
  static std::atomic<int> groups{0};
  auto* name = static_cast<char*>(id->data);
  std::snprintf(name, kName, "/stand_in_%d_%d", getpid(), groups++);
  int file = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0) return failed("unique id", std::strerror(errno));
  int done = ftruncate(file, sizeof(Shared));
  close(file);
  return done == 0 ? C_SUCCESS : failed("unique id", std::strerror(errno));
}

inline C_Status join(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  if (ranks > kRanks) return failed("a group", "it has more ranks than the stand-in takes");
  auto* name = static_cast<char*>(id->data);
  int file = shm_open(name, O_RDWR, 0600);
  if (file < 0) return failed("a group", std::strerror(errno));
  void* shared = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return failed("a group", std::strerror(errno));
  auto* joined = new Group(static_cast<Shared*>(shared), rank, ranks);
  bool met = joined->meet();
  if (rank == 0) shm_unlink(name);
  *comm = reinterpret_cast<C_CCLComm>(joined);
  return met ? C_SUCCESS : failed("a group", "a rank didn't come");
}

inline C_Status leave(C_CCLComm comm) { return delete group(comm), C_SUCCESS; }

inline C_Status all_reduce(void* send, void* receive, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                           C_Stream) {
  size_t width = size_of(type);
  return group(comm)->run("all_reduce", send, count, type, 0, [&](size_t first, size_t elements) {
    return group(comm)->reduce(static_cast<char*>(receive) + first * width, elements, type, op);
  });
}

inline C_Status reduce(void* send, void* receive, size_t count, C_DataType type, C_CCLReduceOp op, size_t root,
                       C_CCLComm comm, C_Stream) {
  size_t width = size_of(type);
  return group(comm)->run("reduce", send, count, type, root, [&](size_t first, size_t elements) {
    char* to = static_cast<char*>(receive) + first * width;
    return group(comm)->rank() != root || group(comm)->reduce(to, elements, type, op);
  });
}

inline C_Status broadcast(void* both, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream) {
  size_t width = size_of(type);
  return group(comm)->run("broadcast", both, count, type, root, [&](size_t first, size_t elements) {
    char* to = static_cast<char*>(both) + first * width;
    return group(comm)->rank() == root || group(comm)->copy(to, root, elements * width);
  });
}

inline C_Status all_gather(void* send, void* receive, size_t count, C_DataType type, C_CCLComm comm, C_Stream) {
  size_t width = size_of(type);
  return group(comm)->run("all_gather", send, count, type, 0, [&](size_t first, size_t elements) {
    bool all = true;
    for (size_t from = 0; from < group(comm)->ranks(); ++from)
      all &= group(comm)->copy(static_cast<char*>(receive) + (from * count + first) * width, from, elements * width);
    return all;
  });
}

}  // namespace stand_in
