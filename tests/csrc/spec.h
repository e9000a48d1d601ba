// Specs as messages: in a run Python makes them (torchbeast/remote/protocol.py).

#pragma once

#include "wire.h"

namespace torchbeast {

inline void encode_structure(const Structure& structure, protocol::Structure* pb) {
  pb->set_kind(static_cast<protocol::Structure::Kind>(structure.kind));
  for (const std::string& key : structure.keys) pb->add_keys(key);
  for (const Structure& child : structure.children) {
    encode_structure(child, pb->add_children());
  }
}

[[nodiscard]] inline protocol::Spec encode_spec(const Nest<ArraySpec>& spec) {
  protocol::Spec pb;
  encode_structure(*spec.structure, pb.mutable_structure());
  for (const ArraySpec& leaf : spec.leaves) {
    protocol::ArraySpec* array = pb.add_arrays();
    array->set_code(leaf.dtype.code);
    array->set_bits(leaf.dtype.bits);
    for (int i = 0; i < leaf.shape.rank(); ++i) array->add_shape(leaf.shape[i]);
  }
  return pb;
}

}  // namespace torchbeast
