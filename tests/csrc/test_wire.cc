#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include "arrays.h"
#include "spec.h"
#include "wire.h"

namespace torchbeast {

const Structure kStructure =
    dict({"observation", "reward"},
         {tuple({leaf(), Structure{Kind::kList, {}, {leaf()}}}), leaf()});

Nest<ArraySpec> spec_of(const Nest<Array>& nest) {
  return nest.map([](const Array& a) { return ArraySpec{a.dtype, a.shape}; });
}

// A valid message, and what it was made of.
struct Message {
  Nest<Array> nest = make_nest<Array>(
      kStructure, {count_up({2, 3}), count_up({}), count_up({2, 0}, 7)});
  protocol::Spec spec = encode_spec(spec_of(nest));
  std::shared_ptr<protocol::Arrays> arrays = std::make_shared<protocol::Arrays>();

  Message() { encode_arrays(nest, arrays.get()); }

  [[nodiscard]] std::string spec_refusal() const {
    return message<std::invalid_argument>([&] { (void)decode_spec(spec); });
  }
  [[nodiscard]] std::string refusal() const {
    return message<std::invalid_argument>(
        [&] { (void)decode_arrays(decode_spec(spec), arrays); });
  }
};

TEST_CASE("a nest of arrays arrives as it was sent") {
  Message m;
  protocol::Spec spec;
  REQUIRE(spec.ParseFromString(m.spec.SerializeAsString()));
  auto arrays = std::make_shared<protocol::Arrays>();
  REQUIRE(arrays->ParseFromString(m.arrays->SerializeAsString()));
  const Nest<Array> result = decode_arrays(decode_spec(spec), arrays);
  CHECK(*result.structure == kStructure);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(result.leaves[i].dtype == m.nest.leaves[i].dtype);
    CHECK(result.leaves[i].shape == m.nest.leaves[i].shape);
    CHECK(elements(result.leaves[i]) == elements(m.nest.leaves[i]));
  }
}

TEST_CASE("arrays keep the message alive that they lie in") {
  Nest<Array> result;
  {
    Message m;
    result = decode_arrays(decode_spec(m.spec), std::move(m.arrays));
  }
  CHECK(elements(result.leaves[0]) == std::vector<int32_t>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("strided arrays are sent row-major") {
  const Nest<Array> nest = single(count_up({3, 4}).narrow(1, 1, 2));
  auto pb = std::make_shared<protocol::Arrays>();
  encode_arrays(nest, pb.get());
  CHECK(elements(decode_arrays(spec_of(nest), pb).leaves[0]) ==
        std::vector<int32_t>{1, 2, 5, 6, 9, 10});
}

TEST_CASE("arrays other than the spec's are refused by name") {
  Message m;
  m.arrays->mutable_data(0)->pop_back();
  CHECK(contains(m.refusal(),
                 "leaf 'observation/0' has 23 bytes, expected 24: int32 [2, 3]"));
  m.arrays->mutable_data()->RemoveLast();
  CHECK(contains(m.refusal(), "got 2 arrays, expected 3"));
}

TEST_CASE("a spec that lies about its leaves is refused") {
  {
    Message m;
    m.spec.mutable_arrays()->RemoveLast();
    CHECK(contains(m.spec_refusal(), "3 leaves, but 2 arrays"));
  }
  {
    Message m;
    m.spec.mutable_structure()->add_keys("observation");
    CHECK(contains(m.spec_refusal(), "3 keys for a dict"));
  }
  {
    Message m;
    m.spec.mutable_structure()->set_keys(1, "observation");
    CHECK(contains(m.spec_refusal(), "'observation' comes twice"));
  }
  {
    Message m;
    m.spec.mutable_structure()->set_kind(protocol::Structure::LEAF);
    CHECK(contains(m.spec_refusal(), "a leaf has children"));
  }
  {
    Message m;
    m.spec.mutable_structure()->set_kind(static_cast<protocol::Structure::Kind>(9));
    CHECK(contains(m.spec_refusal(), "unknown kind of nest 9"));
  }
}

TEST_CASE("types, ranks and sizes beyond the limits are refused") {
  const auto refusal = [](auto change) {
    Message m;
    change(m.spec.mutable_arrays(0));
    return m.spec_refusal();
  };
  CHECK(
      contains(refusal([](auto* a) { a->set_code(5); }), "unknown type 5 of 32 bits"));
  CHECK(contains(refusal([](auto* a) { a->set_code(256); }), "unknown type 256"));
  CHECK(contains(refusal([](auto* a) { a->set_bits(24); }), "of 24 bits"));
  CHECK(contains(refusal([](auto* a) {
                   for (int i = 0; i < 7; ++i) a->add_shape(1);
                 }),
                 "9 dimensions, expected at most 8"));
  CHECK(contains(refusal([](auto* a) { a->set_shape(0, -1); }), "shape [-1"));
  CHECK(contains(refusal([](auto* a) { a->set_shape(0, int64_t{1} << 62); }), "2^28"));
  CHECK(contains(refusal([](auto* a) {
                   a->set_shape(0, 1 << 28);
                   a->set_shape(1, 1 << 28);
                 }),
                 "more than 268435456 bytes"));
  // Nor may an empty array's strides overflow.
  CHECK(contains(refusal([](auto* a) {
                   a->set_shape(0, 0);
                   for (int i = 0; i < 4; ++i) a->add_shape(1 << 28);
                 }),
                 "more than 268435456 bytes"));
}

TEST_CASE("a bool that is neither 0 nor 1 is refused") {
  const Nest<ArraySpec> spec = make_nest<ArraySpec>(leaf(), {{{DType::kBool, 8}, {3}}});
  auto arrays = std::make_shared<protocol::Arrays>();
  arrays->add_data(std::string("\0\1\1", 3));
  CHECK(decode_arrays(spec, arrays).leaves.size() == 1);
  arrays->set_data(0, std::string("\0\1\2", 3));
  CHECK(contains(
      message<std::invalid_argument>([&] { (void)decode_arrays(spec, arrays); }),
      "the array has a bool that is neither 0 nor 1"));
}

// What check_size() says to these bytes.
std::string size_refusal(const std::string& bytes) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(),
                                                static_cast<int>(bytes.size()), 7);
  return message<std::invalid_argument>([&] { check_size(&stream); });
}

TEST_CASE("a message that would take much more memory than it has bytes is refused") {
  protocol::Response response;
  for (int i = 0; i < kMaxNodes; ++i) response.mutable_step()->add_data("x");
  response.mutable_welcome()->set_observation_space(std::string(1000000, 'x'));
  const std::string good = response.SerializeAsString();
  CHECK(size_refusal(good) == "nothing was thrown");
  CHECK(size_refusal("") == "nothing was thrown");
  CHECK(contains(size_refusal(good + good), "a welcome of more than 1048576 bytes"));
  protocol::Response step;
  step.mutable_step()->add_data("");
  CHECK(
      contains(size_refusal(good + step.SerializeAsString()), "of more than 1024 arr"));
  CHECK(contains(size_refusal(good + std::string("\x18\0", 2)), "cannot be parsed"));
  CHECK(contains(size_refusal(good + "\x12\x05\x0a\xff\xff"), "cannot be parsed"));
  CHECK(contains(size_refusal("\x12\xff\xff\xff\xff\x0f"), "cannot be parsed"));
}

TEST_CASE("a welcome of its greatest size is parsed in little memory") {
  // The worst there is: each structure takes two bytes, and 88 when it is parsed.
  protocol::Response response;
  auto* structure = response.mutable_welcome()->mutable_step()->mutable_structure();
  for (int i = 0; i < kMaxWelcomeBytes / 2 - 10; ++i) structure->add_children();
  const std::string bytes = response.SerializeAsString();
  CHECK(size_refusal(bytes) == "nothing was thrown");
  protocol::Response parsed;
  REQUIRE(parsed.ParseFromString(bytes));
  CHECK(parsed.SpaceUsedLong() < 64 << 20);
  CHECK(contains(message<std::invalid_argument>(
                     [&] { (void)decode_spec(parsed.welcome().step()); }),
                 "more than 1024 entries"));
  // Deeper than protobuf itself goes: 3 bytes for a level.
  std::string deep;
  for (int i = 0; i < 1000; ++i) {
    deep = "\x1a" + std::string(1, static_cast<char>(deep.size() % 128 | 128)) +
           std::string(1, static_cast<char>(deep.size() / 128)) + deep;
  }
  CHECK(!protocol::Structure().ParseFromString(deep));
}

TEST_CASE("a dict of many keys is refused before they are looked at") {
  protocol::Spec wide;
  wide.mutable_structure()->set_kind(protocol::Structure::DICT);
  for (int i = 0; i < 1000000; ++i) wide.mutable_structure()->add_keys("same");
  CHECK(contains(message<std::invalid_argument>([&] { (void)decode_spec(wide); }),
                 "more than 1024 entries"));
}

TEST_CASE("nests too deep or too large are refused") {
  protocol::Spec deep;
  protocol::Structure* pb = deep.mutable_structure();
  for (int i = 0; i < 50; ++i) {
    pb->set_kind(protocol::Structure::TUPLE);
    pb = pb->add_children();
  }
  CHECK(contains(message<std::invalid_argument>([&] { (void)decode_spec(deep); }),
                 "deeper than 32"));
  protocol::Spec wide;
  wide.mutable_structure()->set_kind(protocol::Structure::TUPLE);
  for (int i = 0; i < 5000; ++i) wide.mutable_structure()->add_children();
  CHECK(contains(message<std::invalid_argument>([&] { (void)decode_spec(wide); }),
                 "more than 1024 entries"));
}

}  // namespace torchbeast
