// A device beside the CPU: Paddle's plugin interface, by the memory of memory.h and the collectives of collectives.h.
//
// It has few kernels (kernels.cc). Everything is done when its call returns, so streams and events are names.

#include "collectives.h"

namespace {

using stand_in::failed;
using stand_in::opened;

thread_local int current = 0;
std::atomic<size_t> copies[3];  // to the device, to the host, within the device

int devices() {
  const char* given = std::getenv("STAND_IN_DEVICES");
  return given ? std::atoi(given) : 2;
}

template <typename... Anything>
C_Status done(Anything...) {
  return C_SUCCESS;
}

// An address of nothing becomes Paddle's out of memory error, as a GPU's is; a failure would become another.
C_Status allocate(const C_Device, void** address, size_t size) {
  *address = stand_in::allocate(size);
  return C_SUCCESS;
}

C_Status release(const C_Device, void* address, size_t) {
  return stand_in::release(address) ? C_SUCCESS : failed("release", "this address isn't the device's");
}

C_Status set(const C_Device, void* address, unsigned char value, size_t size) {
  char* to = opened(address, size);
  if (!to) return failed("set", "this address isn't the device's");
  std::memset(to, value, size);
  return C_SUCCESS;
}

C_Status to_device(const C_Device, void* to, const void* from, size_t size) {
  char* target = opened(to, size);
  if (!target || opened(from, 1)) return failed("a copy to the device", target ? "from the device" : "to the host");
  ++copies[0];
  std::memcpy(target, from, size);
  return C_SUCCESS;
}

C_Status to_host(const C_Device, void* to, const void* from, size_t size) {
  char* source = opened(from, size);
  if (!source || opened(to, 1)) return failed("a copy to the host", source ? "to the device" : "from the host");
  ++copies[1];
  std::memcpy(to, source, size);
  return C_SUCCESS;
}

C_Status within(const C_Device, void* to, const void* from, size_t size) {
  char *target = opened(to, size), *source = opened(from, size);
  if (!target || !source) return failed("a copy within the device", "an address isn't the device's");
  ++copies[2];
  std::memmove(target, source, size);
  return C_SUCCESS;
}

template <C_Status (*copy)(const C_Device, void*, const void*, size_t)>
C_Status later(const C_Device device, C_Stream, void* to, const void* from, size_t size) {
  return copy(device, to, from, size);
}

void fill_memory(C_DeviceInterface* device) {
  device->device_memory_allocate = allocate;
  device->device_memory_deallocate = release;
  device->device_memory_set = set;
  device->memory_copy_h2d = to_device;
  device->memory_copy_d2h = to_host;
  device->memory_copy_d2d = within;
  device->async_memory_copy_h2d = later<to_device>;
  device->async_memory_copy_d2h = later<to_host>;
  device->async_memory_copy_d2d = later<within>;
  device->device_memory_stats = [](const C_Device, size_t* total, size_t* free) {
    *total = stand_in::total_memory(), *free = stand_in::free_memory();
    return C_SUCCESS;
  };
  device->device_min_chunk_size = [](const C_Device, size_t* size) { return *size = 256, C_SUCCESS; };
}

void fill_device(C_DeviceInterface* device) {
  device->initialize = done;
  device->finalize = done;
  device->init_device = done;
  device->deinit_device = done;
  device->set_device = [](const C_Device chosen) { return current = chosen->id, C_SUCCESS; };
  device->get_device = [](const C_Device chosen) { return chosen->id = current, C_SUCCESS; };
  device->get_device_count = [](size_t* count) { return *count = devices(), C_SUCCESS; };
  device->get_device_list = [](size_t* list) {
    for (int id = 0; id < devices(); ++id) list[id] = id;
    return C_SUCCESS;
  };
  device->create_stream = [](const C_Device, C_Stream* stream) {
    static char any;
    return *stream = reinterpret_cast<C_Stream>(&any), C_SUCCESS;
  };
  device->create_event = [](const C_Device, C_Event* event) {
    static char any;
    return *event = reinterpret_cast<C_Event>(&any), C_SUCCESS;
  };
  device->destroy_stream = done;
  device->query_stream = done;
  device->record_event = done;
  device->destroy_event = done;
  device->query_event = done;
  device->synchronize_device = done;
  device->synchronize_stream = done;
  device->synchronize_event = done;
  device->stream_wait_event = done;
}

void fill_collectives(C_DeviceInterface* device) {
  device->xccl_get_unique_id_size = stand_in::unique_id_size;
  device->xccl_get_unique_id = stand_in::unique_id;
  device->xccl_comm_init_rank = stand_in::join;
  device->xccl_destroy_comm = stand_in::leave;
  device->xccl_get_comm_name = [](C_CCLComm, char* name) { return std::strcpy(name, "stand_in"), C_SUCCESS; };
  device->xccl_all_reduce = stand_in::all_reduce;
  device->xccl_reduce = stand_in::reduce;
  device->xccl_broadcast = stand_in::broadcast;
  device->xccl_all_gather = stand_in::all_gather;
  device->xccl_group_start = done;
  device->xccl_group_end = done;
}

}  // namespace

extern "C" {

// How many copies were made: 0 to the device, 1 to the host, 2 within the device.
size_t stand_in_copies(int kind) { return copies[kind]; }

void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  static char name[] = "stand_in";
  params->device_type = params->sub_device_type = name;
  std::memset(params->interface, 0, sizeof(C_DeviceInterface));
  params->interface->size = sizeof(C_DeviceInterface);
  fill_memory(params->interface);
  fill_device(params->interface);
  fill_collectives(params->interface);
}

}  // extern "C"
