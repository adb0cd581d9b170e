// The stand-in's memory. Each allocation is mapped twice: Paddle has the address of a mapping that no process may read
// or write, as a GPU's is to its host; only the stand-in's own copies and collectives know the second mapping.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

namespace stand_in {

struct Block {
  size_t size;
  char* open;  // the second mapping
};

struct Memory {
  std::mutex mutex;
  std::map<char*, Block> blocks;
  size_t used = 0;
};

// Never destroyed: tensors that outlive main() are given back after it.
inline Memory& memory() {
  static auto* only = new Memory;
  return *only;
}

// How much memory a device has: STAND_IN_MEMORY (bytes).
inline size_t total_memory() {
  const char* given = std::getenv("STAND_IN_MEMORY");
  return given ? std::strtoull(given, nullptr, 10) : size_t{8} << 30;
}

inline size_t free_memory() {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().used < total_memory() ? total_memory() - memory().used : 0;
}

// Returns nothing where the device's memory is spent.
inline void* allocate(size_t size) {
  if (size > free_memory()) return nullptr;
  int file = memfd_create("stand_in", MFD_CLOEXEC);
  if (file < 0) return nullptr;
  void *closed = MAP_FAILED, *open = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(size)) == 0) {
    closed = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
    open = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (closed == MAP_FAILED || open == MAP_FAILED) return nullptr;
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().blocks[static_cast<char*>(closed)] = {size, static_cast<char*>(open)};
  memory().used += size;
  return closed;
}

// Returns whether the address was one of ``allocate``'s.
inline bool release(void* address) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = memory().blocks.find(static_cast<char*>(address));
  if (found == memory().blocks.end()) return false;
  munmap(found->first, found->second.size);
  munmap(found->second.open, found->second.size);
  memory().used -= found->second.size;
  memory().blocks.erase(found);
  return true;
}

// Where ``size`` bytes of the device's memory can be read and written; nothing, where they aren't the device's.
inline char* opened(const void* address, size_t size) {
  auto* from = static_cast<char*>(const_cast<void*>(address));
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto after = memory().blocks.upper_bound(from);
  if (after == memory().blocks.begin()) return nullptr;
  auto block = std::prev(after);
  size_t offset = from - block->first;
  return offset + size <= block->second.size ? block->second.open + offset : nullptr;
}

}  // namespace stand_in
