#include "launch.h"

// Pins `bytes` of host memory that already exist (the arena) and maps them for the device.
MFLEX_API int32_t mflex_cuda_host_register(void* address, int64_t bytes) {
  return cudaHostRegister(address, static_cast<size_t>(bytes),
                          cudaHostRegisterPortable | cudaHostRegisterMapped);
}

MFLEX_API int32_t mflex_cuda_host_unregister(void* address) {
  return cudaHostUnregister(address);
}

// The address at which the device sees registered host memory, also in the middle of it.
MFLEX_API int32_t mflex_cuda_host_address(void* address, void** device_address) {
  cudaPointerAttributes found{};
  const cudaError_t error = cudaPointerGetAttributes(&found, address);
  if (error != cudaSuccess) return error;
  *device_address = found.devicePointer;
  return found.devicePointer == nullptr ? cudaErrorHostMemoryNotRegistered : cudaSuccess;
}

MFLEX_API const char* mflex_cuda_error_text(int32_t code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
