// libFuzzer's target: whatever a server answers, an actor makes rollouts of it that can
// be read, or refuses it by an exception with a text.
//
// An input is an Arrays message, each of whose `data` is a Response, as bytes. The
// answers go through an actor twice: into a batcher and a queue that take anything, and
// into those that have had a good server's step and rollout before.

#include <google/protobuf/message.h>
#include <grpcpp/impl/grpc_library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "actor_pool.h"
#include "array.h"
#include "spec.h"
#include "wire.h"

namespace torchbeast {

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz_stream: %s\n", what);
  abort();
}
#define REQUIRE_THAT(condition) require(condition, #condition)

// A server that says these bytes, whatever it is asked.
class FakeStream final
    : public grpc::ClientReaderWriterInterface<protocol::Request, grpc::ByteBuffer> {
 public:
  explicit FakeStream(const protocol::Arrays& answers) : answers_(answers) {}

  bool Read(grpc::ByteBuffer* bytes) override {
    if (all_read()) return false;
    const std::string& answer = answers_.data(next_++);
    const size_t half = answer.size() / 2;  // As it may come: in pieces.
    const grpc::Slice slices[] = {
        grpc::Slice(answer.data(), half),
        grpc::Slice(answer.data() + half, answer.size() - half)};
    *bytes = grpc::ByteBuffer(slices, 2);
    return true;
  }
  bool Write(const protocol::Request& /*request*/, grpc::WriteOptions) override {
    return true;
  }
  bool NextMessageSize(uint32_t*) override { return true; }
  void WaitForInitialMetadata() override {}
  bool WritesDone() override { return true; }
  grpc::Status Finish() override { return grpc::Status::OK; }

  [[nodiscard]] bool all_read() const { return next_ == answers_.data_size(); }

 private:
  const protocol::Arrays& answers_;
  int next_ = 0;
};

void check_structure(const Structure& s) {
  REQUIRE_THAT(s.keys.size() == (s.kind == Kind::kDict ? s.children.size() : 0));
  REQUIRE_THAT(s.kind != Kind::kLeaf || s.children.empty());
  for (size_t i = 0; i < s.keys.size(); ++i) {
    REQUIRE_THAT(std::find(s.keys.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                           s.keys.end(), s.keys[i]) == s.keys.end());
  }
  for (const Structure& child : s.children) check_structure(child);
}

// All of it can be read, and a bool is one.
void check_nest(const Nest<Array>& nest) {
  check_structure(*nest.structure);
  REQUIRE_THAT(nest.structure->num_leaves() == nest.leaves.size());
  protocol::Arrays bytes;
  encode_arrays(nest, &bytes);
  for (size_t i = 0; i < nest.leaves.size(); ++i) {
    REQUIRE_THAT(nest.leaves[i].dtype.valid());
    REQUIRE_THAT(!nest.structure->leaf_name(i).empty());
    if (nest.leaves[i].dtype.code != DType::kBool) continue;
    for (const char c : bytes.data(static_cast<int>(i))) {
      REQUIRE_THAT(c == 0 || c == 1);
    }
  }
}

// An actor, whose agent always answers action 0.
class Pool : public ActorPool {
 public:
  explicit Pool(bool check)
      : Pool(check, std::make_shared<LearnerQueue>(queue_options(check)),
             std::make_shared<DynamicBatcher>(queue_options(check), check)) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    batcher_->close();
    agent_.join();
  }

  // Whether a rollout came of the answers.
  bool run(const protocol::Arrays& answers) {
    FakeStream stream(answers);
    Actor actor;
    try {
      if (options().max_streams > 0) {  // As of a host that dialed.
        const auto status = accept("host", &stream, &stream, [] {});
        check_text(status.error_message());
        const bool ended = status.error_message() == "the host is gone";
        REQUIRE_THAT(!ended || stream.all_read());
      } else {
        converse(&actor, &stream, &stream);
        REQUIRE_THAT(stream.all_read());  // Or the actor would wait for ever.
      }
    } catch (const std::invalid_argument& e) {
      check_text(e.what());
    } catch (const std::runtime_error& e) {
      check_text(e.what());
    }
    const bool result = queue_->size() > 0;
    while (queue_->size() > 0) check_nest(queue_->dequeue_many().arrays);
    return result;
  }

 private:
  Pool(bool check, const std::shared_ptr<LearnerQueue>& queue,
       const std::shared_ptr<DynamicBatcher>& batcher)
      : ActorPool(short_rollouts(check), queue, batcher, {},
                  {std::make_shared<const Structure>(kState),
                   {zeros({DType::kFloat, 32}, {1, 1, 2})}}),
        queue_(queue),
        batcher_(batcher),
        agent_([this] { answer(); }) {}

  static Options short_rollouts(bool check) {
    Options options;
    options.unroll_length = 2;
    options.one_episode = check;
    options.max_streams = check ? 0 : 1;
    return options;
  }

  static BatchingOptions queue_options(bool check) {
    return {1, 1, 8, std::nullopt, check, std::nullopt};
  }
  static Array zeros(DType dtype, const Dims& shape) {
    const Array array = allocate_array(heap_memory, dtype, shape);
    std::memset(array.data.get(), 0,
                static_cast<size_t>(shape.product()) * dtype.bytes());
    return array;
  }
  static void check_text(const std::string& text) {
    REQUIRE_THAT(!text.empty());
    REQUIRE_THAT(text != std::bad_alloc().what());
  }

  void answer() {
    try {
      for (;;) {
        const auto batch = batcher_->get_batch();
        check_nest(batch->get_inputs());
        const int64_t n = batch->size();
        const Structure outputs{Kind::kDict, {"action", "logits"}, {{}, {}}};
        batch->set_outputs(
            {std::make_shared<const Structure>(
                 Structure{Kind::kTuple, {}, {outputs, kState}}),
             {zeros({DType::kInt, 64}, {1, n}), zeros({DType::kFloat, 32}, {1, n, 3}),
              batch->get_inputs().leaves.back()}});
      }
    } catch (const Closed&) {
    }
  }

  inline static const Structure kState{Kind::kTuple, {}, {Structure()}};

  const std::shared_ptr<LearnerQueue> queue_;
  const std::shared_ptr<DynamicBatcher> batcher_;
  std::thread agent_;
};

// As many bytes in each array as the spec says.
void make_consistent(const Nest<ArraySpec>& spec, protocol::Arrays* arrays) {
  int64_t total = 0;
  for (const ArraySpec& leaf : spec.leaves) total += leaf.bytes();
  if (total > 1 << 14) return;
  while (arrays->data_size() < static_cast<int>(spec.leaves.size())) arrays->add_data();
  for (size_t i = 0; i < spec.leaves.size(); ++i) {
    arrays->mutable_data(static_cast<int>(i))
        ->resize(static_cast<size_t>(spec.leaves[i].bytes()));
  }
}

// What a server of one environment says in three steps.
protocol::Arrays good_answers() {
  const std::vector<std::string> keys{"observation", "reward",    "done",
                                      "terminated",  "truncated", "episode_end"};
  const ArraySpec flag{{DType::kBool, 8}, {1}};
  const Nest<ArraySpec> step{
      std::make_shared<const Structure>(
          Structure{Kind::kDict, keys, std::vector<Structure>(keys.size())}),
      {{{DType::kInt, 32}, {1, 2}},
       {{DType::kFloat, 32}, {1}},
       flag,
       flag,
       flag,
       flag}};
  const Nest<ArraySpec> action{std::make_shared<const Structure>(),
                               {{{DType::kInt, 64}, {1}}}};
  protocol::Response response;
  make_consistent(step, response.mutable_step());
  protocol::Arrays answers;
  for (int i = 0; i < 3; ++i) answers.add_data(response.SerializeAsString());
  response.mutable_welcome()->set_version(kProtocolVersion);
  response.mutable_welcome()->set_num_envs(1);
  *response.mutable_welcome()->mutable_step() = encode_spec(step);
  *response.mutable_welcome()->mutable_action() = encode_spec(action);
  answers.set_data(0, response.SerializeAsString());
  return answers;
}

// Mutations.

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using Random = std::mt19937;

// A message and all those in it.
void collect(Message* message, std::vector<Message*>* all) {
  all->push_back(message);
  std::vector<const FieldDescriptor*> fields;
  const auto* reflection = message->GetReflection();
  reflection->ListFields(*message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      collect(reflection->MutableMessage(message, field), all);
      continue;
    }
    for (int i = 0; i < reflection->FieldSize(*message, field); ++i) {
      collect(reflection->MutableRepeatedMessage(message, field, i), all);
    }
  }
}

int64_t number(Random& random) {
  static constexpr int64_t kNumbers[] = {
      0,       1,          2,         3,          7,
      8,       9,          16,        32,         64,
      128,     255,        256,       1023,       1024,
      4096,    4097,       -1,        1 << 28,    (1 << 28) + 1,
      1 << 30, 2147483647, 1LL << 31, 1LL << 32,  1LL << 62,
      INT_MIN, INT64_MIN,  INT64_MAX, 0x80000001, 1LL << 40};
  return kNumbers[random() % (sizeof(kNumbers) / sizeof(kNumbers[0]))];
}

std::string text(Random& random) {
  static const std::string kTexts[] = {
      "", "action", "core_state", "logits", "reward", "\xff", std::string(1, '\0')};
  const size_t i = random() % 8;
  return i < 7 ? kTexts[i] : std::string(random() % 2000, 'x');
}

std::string bytes(std::string data, Random& random) {
  switch (random() % 4) {
    case 0:
      data.resize(random() % 2 ? data.size() / 2 : data.size() + 1);
      break;
    case 1:
      data.assign(random() % 300, static_cast<char>(random()));
      break;
    default:
      if (!data.empty()) data[random() % data.size()] = static_cast<char>(random());
  }
  return data;
}

// One field of it, set, added to, doubled, swapped, shortened or cleared.
void mutate_field(Message* message, Random& random) {
  const auto* descriptor = message->GetDescriptor();
  const auto* reflection = message->GetReflection();
  const FieldDescriptor* field =
      descriptor->field(static_cast<int>(random() % descriptor->field_count()));
  const int size = field->is_repeated() ? reflection->FieldSize(*message, field) : 0;
  if (size > 0 && random() % 2) {
    if (random() % 2) return reflection->RemoveLast(message, field);
    return reflection->SwapElements(message, field, static_cast<int>(random() % size),
                                    static_cast<int>(random() % size));
  }
  if (random() % 16 == 0) return reflection->ClearField(message, field);
  const bool add = field->is_repeated() && (size == 0 || random() % 2);
  const int i = size > 0 ? static_cast<int>(random() % size) : 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: {
      const auto value = static_cast<int32_t>(number(random));
      return reflection->SetInt32(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_UINT32: {
      const auto value = static_cast<uint32_t>(number(random));
      return reflection->SetUInt32(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_ENUM: {
      const int value = static_cast<int>(random() % 5);
      return reflection->SetEnumValue(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      const int64_t value = number(random);
      if (add) return reflection->AddInt64(message, field, value);
      if (field->is_repeated()) {
        return reflection->SetRepeatedInt64(message, field, i, value);
      }
      return reflection->SetInt64(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_STRING: {
      const bool is_bytes = field->type() == FieldDescriptor::TYPE_BYTES;
      std::string value = text(random);
      if (is_bytes) {
        value = size > 0 ? reflection->GetRepeatedString(*message, field, i) : "";
        value = bytes(value, random);
      }
      if (add) return reflection->AddString(message, field, value);
      if (field->is_repeated()) {
        return reflection->SetRepeatedString(message, field, i, value);
      }
      return reflection->SetString(message, field, value);
    }
    case FieldDescriptor::CPPTYPE_MESSAGE: {
      if (!field->is_repeated()) {
        reflection->MutableMessage(message, field);
        return;
      }
      Message* added = reflection->AddMessage(message, field);
      if (size > 0) {
        added->CopyFrom(reflection->GetRepeatedMessage(*message, field, i));
      }
      return;
    }
    default:
      return;
  }
}

}  // namespace torchbeast

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size)
    __attribute__((weak));  // Where the inputs are only replayed.

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  using namespace torchbeast;
  Random random(seed);
  protocol::Arrays answers;
  if (!answers.ParseFromArray(data, static_cast<int>(size)) ||
      answers.data_size() == 0) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  const int i = static_cast<int>(random() % answers.data_size());
  std::string* answer = answers.mutable_data(i);
  protocol::Response response;
  if (random() % 8 == 0 || !response.ParseFromString(*answer)) {  // Byte by byte.
    const size_t old_size = answer->size();
    answer->resize(old_size + 16);
    answer->resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(answer->data()),
                                    old_size, answer->size()));
  } else {
    for (size_t n = 1 + random() % 3; n > 0; --n) {
      std::vector<Message*> messages;
      collect(&response, &messages);
      mutate_field(messages[random() % messages.size()], random);
    }
    (void)response.SerializePartialToString(answer);
  }
  if (random() % 8 == 0) answers.add_data(answers.data(i));
  if (random() % 2) {  // So that changes of a spec get past the look at the arrays.
    protocol::Response first;
    try {
      if (first.ParseFromString(answers.data(0))) {
        const Nest<ArraySpec> spec = decode_spec(first.welcome().step());
        for (std::string& other : *answers.mutable_data()) {
          if (!response.ParseFromString(other)) continue;
          make_consistent(spec, response.mutable_step());
          (void)response.SerializePartialToString(&other);
        }
      }
    } catch (const std::invalid_argument&) {
    }
  }
  const std::string result = answers.SerializeAsString();
  if (result.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::copy(result.begin(), result.end(), data);
  return result.size();
}

// Whatever bytes come, decoding gives arrays that come out of another encoding
// unchanged, or throws invalid_argument.
static void check_round_trip(const torchbeast::protocol::Response& response) {
  using namespace torchbeast;
  try {
    const Nest<ArraySpec> spec = decode_spec(response.welcome().step());
    check_structure(*spec.structure);
    REQUIRE_THAT(spec.leaves.size() == spec.structure->num_leaves());
    const Nest<ArraySpec> again = decode_spec(encode_spec(spec));
    REQUIRE_THAT(*again.structure == *spec.structure);
    const auto arrays = std::make_shared<protocol::Arrays>(response.step());
    const Nest<Array> nest = decode_arrays(spec, arrays);
    check_nest(nest);
    protocol::Arrays copy;
    encode_arrays(nest, &copy);
    arrays->DiscardUnknownFields();
    REQUIRE_THAT(copy.SerializeAsString() == arrays->SerializeAsString());
  } catch (const std::invalid_argument&) {
  }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torchbeast;
  static grpc::internal::GrpcLibraryInitializer library;
  library.summon();
  google::protobuf::SetLogHandler(nullptr);
  protocol::Arrays answers;
  if (!answers.ParseFromArray(data, static_cast<int>(size))) return 0;
  protocol::Response first;
  if (answers.data_size() == 0 || !first.ParseFromString(answers.data(0))) return 0;
  check_round_trip(first);
  static Pool any(/*check=*/false);
  static Pool checking(/*check=*/true);
  static const bool good = checking.run(good_answers());
  REQUIRE_THAT(good);
  if (any.run(answers)) checking.run(answers);
  return 0;
}
