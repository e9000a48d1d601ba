// Nests of arrays as torchbeast.proto sends them. What comes in is checked before any
// memory is taken for it: the other side may be anybody.

#pragma once

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "array.h"
#include "nest.h"
#include "torchbeast.pb.h"

namespace torchbeast {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "arrays are sent as they are");

inline constexpr size_t kMaxErrorBytes = 4000;  // No more is kept of an error.
inline constexpr int kMaxMessageBytes = 1 << 28;
inline constexpr int kMaxWelcomeBytes = 1 << 20;  // Specs and texts, but no arrays.
inline constexpr int kMaxMetricsBytes = 1 << 20;  // All episodes' of a step.
inline constexpr uint32_t kMetricsOverhead = 40;  // An episode's, in memory.
inline constexpr int kMaxNodes = 1024;  // A structure has no more, leaves included.
inline constexpr int64_t kMaxBytes = kMaxMessageBytes;  // All arrays' of a nest.

struct ArraySpec {
  DType dtype;
  Dims shape;

  [[nodiscard]] int64_t bytes() const {
    return shape.product() * static_cast<int64_t>(dtype.bytes());
  }
};

namespace internal {

inline Structure decode_structure(const protocol::Structure& pb, int depth,
                                  int* nodes) {
  const auto refuse = [](const std::string& what) {
    throw std::invalid_argument(what);
  };
  if (depth > kMaxDepth) {
    refuse("the nest is deeper than " + std::to_string(kMaxDepth) + " levels");
  }
  if (++*nodes > kMaxNodes) {
    refuse("the nest has more than " + std::to_string(kMaxNodes) + " entries");
  }
  if (!protocol::Structure::Kind_IsValid(pb.kind())) {
    refuse("unknown kind of nest " + std::to_string(pb.kind()));
  }
  if (std::max(pb.keys_size(), pb.children_size()) > kMaxNodes - *nodes) {
    refuse("the nest has more than " + std::to_string(kMaxNodes) + " entries");
  }
  Structure result;
  result.kind = static_cast<Kind>(pb.kind());
  if (result.kind == Kind::kLeaf && pb.children_size() > 0)
    refuse("a leaf has children");
  if (pb.keys_size() != (result.kind == Kind::kDict ? pb.children_size() : 0)) {
    refuse(std::to_string(pb.keys_size()) + " keys for " + result.describe());
  }
  result.keys.assign(pb.keys().begin(), pb.keys().end());
  std::unordered_set<std::string> seen;
  for (const std::string& key : result.keys) {
    if (!seen.insert(key).second) refuse("the key '" + key + "' comes twice");
  }
  for (const protocol::Structure& child : pb.children()) {
    result.children.push_back(decode_structure(child, depth + 1, nodes));
  }
  return result;
}

}  // namespace internal

// Throws invalid_argument for a Response that would take much more memory when it is
// parsed than it has bytes: two of them make an empty array of 48.
inline void check_size(google::protobuf::io::ZeroCopyInputStream* response) {
  const auto refuse = [](const std::string& what) {
    throw std::invalid_argument("the server sent a message " + what);
  };
  google::protobuf::io::CodedInputStream in(response);
  // The next field, which has bytes; 0 at the end. All other fields are refused.
  const auto read_field = [&](uint32_t* size) {
    constexpr uint32_t kLengthDelimited = 2;
    const uint32_t tag = in.ReadTag();
    if (tag == 0) return 0u;
    if (tag % 8 != kLengthDelimited || !in.ReadVarint32(size) ||
        *size > kMaxMessageBytes) {
      refuse("that cannot be parsed");
    }
    return tag / 8;
  };
  const auto skip = [&](uint32_t size) {
    if (!in.Skip(static_cast<int>(size))) refuse("that cannot be parsed");
  };
  uint32_t welcome_bytes = 0;
  uint32_t metrics_bytes = 0;
  int num_arrays = 0;
  uint32_t size = 0;
  while (const uint32_t field = read_field(&size)) {
    if (field == protocol::Response::kWelcomeFieldNumber) {
      welcome_bytes += size;
      if (welcome_bytes > kMaxWelcomeBytes) {
        refuse("with a welcome of more than " + std::to_string(kMaxWelcomeBytes) +
               " bytes");
      }
      skip(size);
    } else if (field == protocol::Response::kStepFieldNumber) {
      const auto outer = in.PushLimit(static_cast<int>(size));
      while (const uint32_t inner = read_field(&size)) {
        if (inner != protocol::Arrays::kDataFieldNumber) {
          refuse("that cannot be parsed");
        }
        if (++num_arrays > kMaxNodes) {
          refuse("of more than " + std::to_string(kMaxNodes) + " arrays");
        }
        skip(size);
      }
      in.PopLimit(outer);
    } else if (field == protocol::Response::kMetricsFieldNumber) {
      metrics_bytes += size + kMetricsOverhead;
      if (metrics_bytes > kMaxMetricsBytes) {
        refuse("with metrics of more than " + std::to_string(kMaxMetricsBytes) +
               " bytes");
      }
      skip(size);
    } else if (field == protocol::Response::kErrorFieldNumber &&
               size <= kMaxErrorBytes) {
      skip(size);
    } else {
      refuse("that cannot be parsed");
    }
  }
}

// Throws invalid_argument that says what is wrong with it.
[[nodiscard]] inline Nest<ArraySpec> decode_spec(const protocol::Spec& pb) {
  int nodes = 0;
  auto structure = std::make_shared<const Structure>(
      internal::decode_structure(pb.structure(), 0, &nodes));
  Nest<ArraySpec> result{structure, {}};
  const size_t n = structure->num_leaves();
  if (static_cast<size_t>(pb.arrays_size()) != n) {
    throw std::invalid_argument("the nest has " + std::to_string(n) + " leaves, but " +
                                std::to_string(pb.arrays_size()) + " arrays");
  }
  int64_t total = 0;
  for (size_t i = 0; i < n; ++i) {
    const protocol::ArraySpec& array = pb.arrays(static_cast<int>(i));
    const auto refuse = [&](const std::string& what) {
      throw std::invalid_argument(structure->leaf_name(i) + " " + what);
    };
    ArraySpec spec{
        {static_cast<uint8_t>(array.code()), static_cast<uint8_t>(array.bits())}, {}};
    if (array.code() > 255 || array.bits() > 255 || !spec.dtype.valid()) {
      refuse("has the unknown type " + std::to_string(array.code()) + " of " +
             std::to_string(array.bits()) + " bits");
    }
    if (array.shape_size() > kMaxRank) {
      refuse("has " + std::to_string(array.shape_size()) +
             " dimensions, expected at most " + std::to_string(kMaxRank));
    }
    int64_t bytes = static_cast<int64_t>(spec.dtype.bytes());
    for (const int64_t size : array.shape()) {
      spec.shape.push_back(size);
      if (size < 0 || size > kMaxBytes) {
        refuse("has shape " + spec.shape.str() + ", expected sizes from 0 to 2^28");
      }
      // An empty array's other sizes count, too: its strides are made of them.
      bytes *= std::max<int64_t>(1, size);
      if (bytes > kMaxBytes) break;
    }
    total += bytes;
    if (total > kMaxBytes) {
      refuse("makes more than " + std::to_string(kMaxBytes) + " bytes in all");
    }
    result.leaves.push_back(spec);
  }
  return result;
}

// The message's arrays, where they lie in it: they keep it alive. Throws
// invalid_argument if they are not what the spec says.
[[nodiscard]] inline Nest<Array> decode_arrays(
    const Nest<ArraySpec>& spec, std::shared_ptr<const protocol::Arrays> pb) {
  if (static_cast<size_t>(pb->data_size()) != spec.leaves.size()) {
    throw std::invalid_argument("got " + std::to_string(pb->data_size()) +
                                " arrays, expected " +
                                std::to_string(spec.leaves.size()));
  }
  Nest<Array> result{spec.structure, {}};
  result.leaves.reserve(spec.leaves.size());
  for (size_t i = 0; i < spec.leaves.size(); ++i) {
    const ArraySpec& leaf = spec.leaves[i];
    const std::string& data = pb->data(static_cast<int>(i));
    if (static_cast<int64_t>(data.size()) != leaf.bytes()) {
      throw std::invalid_argument(spec.structure->leaf_name(i) + " has " +
                                  std::to_string(data.size()) + " bytes, expected " +
                                  std::to_string(leaf.bytes()) + ": " +
                                  leaf.dtype.name() + " " + leaf.shape.str());
    }
    // Whoever reads another byte as a bool may do anything.
    if (leaf.dtype.code == DType::kBool &&
        std::any_of(data.begin(), data.end(),
                    [](char c) { return c != 0 && c != 1; })) {
      throw std::invalid_argument(spec.structure->leaf_name(i) +
                                  " has a bool that is neither 0 nor 1");
    }
    // Arrays into a message are only read.
    auto* bytes = reinterpret_cast<std::byte*>(const_cast<char*>(data.data()));
    result.leaves.push_back({leaf.dtype, leaf.shape, contiguous_strides(leaf.shape),
                             std::shared_ptr<std::byte>(pb, bytes)});
  }
  return result;
}

inline void encode_arrays(const Nest<Array>& nest, protocol::Arrays* pb) {
  pb->clear_data();
  for (const Array& array : nest.leaves) {
    std::string* data = pb->add_data();
    data->resize(static_cast<size_t>(array.shape.product()) * array.dtype.bytes());
    auto* bytes = reinterpret_cast<std::byte*>(data->data());
    copy(array, {array.dtype, array.shape, contiguous_strides(array.shape),
                 std::shared_ptr<std::byte>(std::shared_ptr<void>(), bytes)});
  }
}

}  // namespace torchbeast
