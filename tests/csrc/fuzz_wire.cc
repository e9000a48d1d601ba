// libFuzzer's target: whatever bytes come, decoding gives arrays that can be read, and
// come out of another encoding unchanged, or throws invalid_argument.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "array.h"
#include "wire.h"

// The input is a Spec, then Arrays; its first byte says where, in 256ths.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torchbeast;
  if (size == 0) return 0;
  const size_t split = 1 + (size - 1) * data[0] / 256;
  protocol::Spec spec_pb;
  auto arrays_pb = std::make_shared<protocol::Arrays>();
  if (!spec_pb.ParseFromArray(data + 1, static_cast<int>(split - 1))) return 0;
  if (!arrays_pb->ParseFromArray(data + split, static_cast<int>(size - split)))
    return 0;
  try {
    const Nest<ArraySpec> spec = decode_spec(spec_pb);
    if (spec.leaves.size() != spec.structure->num_leaves()) abort();
    const Nest<ArraySpec> again = decode_spec(encode_spec(spec));
    if (!(*again.structure == *spec.structure)) abort();
    const Nest<Array> nest = decode_arrays(spec, arrays_pb);
    protocol::Arrays copy;
    encode_arrays(nest, &copy);
    if (copy.data_size() != arrays_pb->data_size()) abort();
    for (int i = 0; i < copy.data_size(); ++i) {
      if (copy.data(i) != arrays_pb->data(i)) abort();
    }
  } catch (const std::invalid_argument&) {
  }
  return 0;
}
