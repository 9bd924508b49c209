// The C interface of the copy kernels' CPU forms. Sizes are in bytes unless said otherwise;
// `threads` of 0 stands for all cores that the process may use. megatron_flex/native.py mirrors
// this file.
#pragma once

#include "api.h"

// Copies sizes[i] bytes from sources[i] to targets[i] (addresses), for all i < count. Targets must
// not overlap one another or a source.
MFLEX_API void mflex_segment_copy(const int64_t* sources, const int64_t* targets,
                                  const int64_t* sizes, int64_t count, int32_t threads);

// Fills first_tile[0..count] for tiles of `tile_bytes`; returns the number of tiles.
MFLEX_API int64_t mflex_segment_tiles(const int64_t* sizes, int64_t count, int64_t tile_bytes,
                                      int64_t* first_tile);

// Copies in chunks and sets each chunk's flag to `version` when its bytes are in place (chunks.h).
MFLEX_API void mflex_chunked_write(const char* source, char* target, int64_t bytes,
                                   int64_t chunk_bytes, uint64_t* flags, uint64_t version,
                                   int32_t threads);

// Copies in chunks, each as soon as its flag holds `version`. Returns 0 when all are copied;
// 1 + the number of a chunk that did not come within `timeout_ns` nanoseconds of waiting for it;
// -1 - the number of a chunk that holds a newer version.
MFLEX_API int64_t mflex_chunked_read(const char* source, char* target, int64_t bytes,
                                     int64_t chunk_bytes, const uint64_t* flags, uint64_t version,
                                     int64_t timeout_ns, int32_t threads);

// The GPU's indexing on the CPU, for tests: every tile and every lane, one after the other.
MFLEX_API void mflex_segment_copy_by_lanes(const int64_t* sources, const int64_t* targets,
                                           const int64_t* sizes, const int64_t* first_tile,
                                           int64_t count, int64_t tile_bytes, int64_t lanes);
