// ActorPool: one stream to each environment server; steps in, rollouts out.

#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent_outputs.h"
#include "array.h"
#include "batching_queue.h"
#include "channel.h"
#include "dynamic_batcher.h"
#include "nest.h"
#include "rollout.h"
#include "torchbeast.pb.h"
#include "wait.h"
#include "wire.h"

namespace torchbeast {

inline constexpr int kProtocolVersion = 3;
inline constexpr int kMaxEnvs = 4096;  // A stream has no more.

inline constexpr size_t kMaxMetricsWaiting = 1 << 24;  // Bytes of them.
inline constexpr size_t kMaxMetrics = 10'000;          // Episodes whose metrics wait.
inline constexpr size_t kMaxToldBytes = 1000;  // Three times, as gRPC sends them.
inline constexpr size_t kMaxDeparted = 1000;   // Streams whose end waits.

struct NoPayload {};
using LearnerQueue = BatchingQueue<NoPayload>;

// Actors: for each address a thread that steps the environments of one stream.
//
// An actor asks the inference batcher for compute((step, core_state)), [1, E, ...]
// each, which answers (outputs, core_state); outputs is a dict with at least "action",
// a nest of arrays [1, E, ...] as the server's Welcome describes it, and what of it is
// to be learned from. Each T steps it puts E items
// into the learner queue: rollouts (rollout.h) of one environment each. Both batch
// along dimension 1.
//
//   run()     blocks until stop(). Throws runtime_error, with what each server said, if
//             none could be reached within connect_timeout_s. One that is connected may
//             take welcome_timeout_s to make its environments, and is then asked again.
//   accept()  steps the environments of a stream that a host has opened (listener.h), in
//             the calling thread, until it ends. Nobody connects again.
//   stop()    any thread, any time. Ends the streams, whatever the server does. Actors
//             that wait for the batcher or the queue end when these are served or
//             closed: close them, too.
//   add(), remove(), status(), rollouts(), stage_seconds(), take_metrics(),
//   take_departed(), allow()
//             any thread, any time; never block for long.
//
// All actors together deliver exactly max_rollouts, and then wait for stop().
//
// Where the step has an entry "waits", agents act by turns: a row that waits has no part
// in the step. Nothing of it goes into the row's rollout.
//
// With allowed_rollouts, actors begin no more than so many, and as many as allow(n) has
// added; then they wait, for allow() or until they end. A rollout that is lost is given
// back. Environments of a stream begin theirs together, as soon as one is allowed. Where
// agents act by turns, a stream takes as many together, and each row begins one at a
// turn of its own. The actor goes on while any row of its stream fills a rollout: what
// the others do until they may begin is in none.
//
// A stream that fails costs its unfinished rollout: the actor connects again, after
// 0.1 s and up to 10 s if it goes on failing. So does one whose host has not answered
// for half a minute; its environments may take as long as they like. An actor ends for
// good when the batcher or the queue is closed. Destroy it after run() has returned.
class ActorPool {
 public:
  struct Options {
    int64_t unroll_length = 20;
    int64_t burn_in = 0;       // Steps of a rollout before these, from the one before.
    bool one_episode = false;  // A rollout ends with its episode, and is padded.
    int64_t seed = 0;
    double connect_timeout_s = 60;
    int64_t max_streams = 0;  // That hosts open.
    double welcome_timeout_s = 300;
    int64_t max_rollouts = std::numeric_limits<int64_t>::max();
    int64_t allowed_rollouts = std::numeric_limits<int64_t>::max();
    int64_t max_message_bytes = kMaxMessageBytes;  // That are read of a server or host.
    int64_t max_envs = std::numeric_limits<int64_t>::max();  // All that hosts open.
    std::string observation_space;  // As the server prints them; empty: not compared.
    std::string action_space;
    std::string tls_cert;  // In PEM, as the next two; all empty: no TLS.
    std::string tls_key;
    std::string tls_ca;
    std::string listen;  // The address of a Listener, if the pool has one.
    RowSpec step;  // [., ...], the server's but for the rows; empty: not compared.
  };

  struct Status {
    int64_t stream = 0;  // Counted as they are added: tells those of an address apart.
    std::string address;
    std::string state;  // "connecting", "running", "waiting to reconnect" or "ended".
    int64_t num_envs = 0;
    std::string environment;  // Its name.
    int64_t steps = 0;        // All of its environments'.
    int64_t rollouts = 0;     // That went into the queue.
    int64_t reconnects = 0;   // Streams that failed.
    int64_t failures = 0;     // Since its last rollout, where a server answered.
    std::string last_error;
    bool dialed_in = false;  // The host has opened it.
  };

  // What became of all rollouts so far, removed actors' included. begun is the sum of
  // the others, and of those that are being filled.
  struct Rollouts {
    int64_t begun = 0;
    int64_t delivered = 0;  // Went into the queue, or wait to. At most max_rollouts.
    int64_t lost = 0;       // Their stream failed.
    int64_t ended = 0;      // Their actor ended: stop(), remove() or max_rollouts.
  };

  // Where the time of all streams went so far.
  struct StageSeconds {
    double environment_wait = 0;  // Servers step, and the network.
    double inference_queue = 0;   // An inference thread was not free.
    double inference = 0;
    double rollout_queue = 0;  // The learner was behind.
  };

  ActorPool(Options options, std::shared_ptr<LearnerQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher,
            const std::vector<std::string>& addresses, Nest<Array> initial_state)
      : options_(std::move(options)),
        learner_queue_(std::move(learner_queue)),
        inference_batcher_(std::move(inference_batcher)),
        initial_state_(std::move(initial_state)),
        allowed_(options_.allowed_rollouts) {
    using internal::require;
    require(options_.unroll_length >= 1, "unroll_length", options_.unroll_length,
            "at least 1");
    require(options_.burn_in >= 0, "burn_in", options_.burn_in, "at least 0");
    require(options_.max_rollouts >= 0, "max_rollouts", options_.max_rollouts,
            "at least 0");
    require(options_.allowed_rollouts >= 1, "allowed_rollouts",
            options_.allowed_rollouts, "at least 1");
    require(options_.max_message_bytes >= 1 &&
                options_.max_message_bytes <= kMaxMessageBytes,
            "max_message_bytes", options_.max_message_bytes,
            "1 to " + std::to_string(kMaxMessageBytes));
    if (options_.one_episode && options_.burn_in > 0) {
      throw std::invalid_argument("burn_in with one_episode, expected one of them");
    }
    if (options_.tls_cert.empty() != options_.tls_key.empty() ||
        options_.tls_cert.empty() != options_.tls_ca.empty()) {
      throw std::invalid_argument(
          "got some of tls_cert, tls_key and tls_ca, expected all three or none");
    }
    for (const Array& array : initial_state_.leaves) {
      if (array.shape.rank() < 2 || array.shape[1] != 1) {
        throw std::invalid_argument("initial_state has shape " + array.shape.str() +
                                    ", expected [., 1, ...]: that of one environment");
      }
    }
    for (const std::string& address : addresses) add(address);
  }
  ActorPool(const ActorPool&) = delete;
  ActorPool& operator=(const ActorPool&) = delete;
  ~ActorPool() {
    stop();
    join();
  }

  void run(Blocking* blocking = nullptr) {
    std::unique_lock<std::mutex> held(mu_);
    // Not in the block below, which would end what the first call does.
    if (running_) throw std::runtime_error("run() was called twice");
    try {
      std::unique_lock<std::mutex> lock(std::move(held));
      running_ = true;
      for (Actor& actor : actors_) start(&actor);
      // Thirty years: Clock cannot count ten times as many.
      const auto timeout =
          std::chrono::duration<double>(std::min(options_.connect_timeout_s, 1e9));
      auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
      const auto reached = [&] { return stopping_ || reached_; };
      // Where hosts may dial in, they may come when they like.
      while (options_.max_streams == 0 &&
             !wait(&lock, &changed_, blocking, until, reached)) {
        hang_up_on_silent();
        if (makes_environments()) {
          until = Clock::now() + std::chrono::seconds(1);
          continue;
        }
        std::string errors;
        for (const Actor& actor : actors_) {
          errors +=
              "; " + actor.status.address + ": " +
              (actor.status.last_error.empty() ? "no answer" : actor.status.last_error);
        }
        throw std::runtime_error("no environment server could be reached within " +
                                 seconds(options_.connect_timeout_s) + " s" + errors);
      }
      while (!wait(&lock, &changed_, blocking, Clock::now() + std::chrono::seconds(1),
                   [&] { return stopping_; })) {
        hang_up_on_silent();
      }
    } catch (...) {
      stop();
      inference_batcher_->close();
      learner_queue_->close();
      if (blocking != nullptr) blocking->begin();
      join();
      throw;
    }
    if (blocking != nullptr) blocking->begin();
    join();
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      stopping_ = true;
      for (Actor& actor : actors_) cancel(&actor);
      for (Actor& guest : guests_) cancel(&guest);
    }
    changed_.notify_all();
  }

  // So many rollouts more may be begun. Nothing without allowed_rollouts.
  void allow(int64_t num_rollouts) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!limited()) return;
      allowed_ += num_rollouts;
    }
    changed_.notify_all();
  }

  // Another stream. The same address may be there several times. Throws where no thread
  // can be started.
  void add(const std::string& address) {
    std::lock_guard<std::mutex> lock(mu_);
    if (stopping_) return;
    // Servers may come and go for weeks. A thread that has set "ended" is as good as
    // joined.
    actors_.remove_if([](Actor& actor) {
      if (!actor.removed || actor.status.state != "ended") return false;
      actor.thread.join();
      return true;
    });
    Actor& actor = actors_.emplace_back();
    actor.status.stream = num_added_++;
    actor.status.address = address;
    actor.status.state = "connecting";
    actor.since = Clock::now();
    try {
      if (running_) start(&actor);
    } catch (...) {
      actors_.pop_back();
      throw;
    }
  }

  // Ends the streams to the address. False if there is none.
  bool remove(const std::string& address) {
    bool found = false;
    {
      std::lock_guard<std::mutex> lock(mu_);
      for (Actor& actor : actors_) {
        if (actor.status.address != address || actor.removed) continue;
        actor.removed = true;
        cancel(&actor);
        found = true;
      }
    }
    changed_.notify_all();
    return found;
  }

  // As they share them, the ends of a stream, on the learner's side.
  using Reader = grpc::internal::ReaderInterface<grpc::ByteBuffer>;
  using Writer = grpc::internal::WriterInterface<protocol::Request>;

  // Returns why the stream ended. cancel() has to make it end.
  grpc::Status accept(const std::string& address, Writer* writer, Reader* reader,
                      std::function<void()> cancel) {
    Actor* guest = nullptr;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (stopping_) return {grpc::StatusCode::UNAVAILABLE, "the learner ends"};
      if (static_cast<int64_t>(guests_.size()) >= options_.max_streams) {
        return {grpc::StatusCode::RESOURCE_EXHAUSTED,
                "this learner has " + std::to_string(options_.max_streams) +
                    " streams already (--max_streams)"};
      }
      guest = &guests_.emplace_back();
      guest->status.stream = num_added_++;
      guest->status.address = address;
      guest->status.state = "connecting";
      guest->status.dialed_in = true;
      guest->cancel = std::move(cancel);
      guest->since = Clock::now();
    }
    grpc::StatusCode code = grpc::StatusCode::FAILED_PRECONDITION;
    std::string error, told;  // What the log says; what the host is told.
    try {
      converse(guest, writer, reader);
      error = "the host is gone";
    } catch (const Closed&) {
      code = grpc::StatusCode::UNAVAILABLE;
      error = "the learner ends";
    } catch (const HostError& e) {
      error = std::string(e.what()).substr(0, kMaxErrorBytes);
      told = "the host has said why";
    } catch (const std::exception& e) {
      error = std::string(e.what()).substr(0, kMaxErrorBytes);
    }
    std::lock_guard<std::mutex> lock(mu_);
    if (guest->silent) error = silence();
    if (told.empty()) told = error.substr(0, kMaxToldBytes);
    give_back(guest, stopping_ ? &rollouts_.ended : &rollouts_.lost);
    guest->status.last_error = error;
    depart(guest->status);
    guests_.remove_if([&](const Actor& other) { return &other == guest; });
    return {code, told};
  }

  // A host got no stream.
  void refuse(const std::string& address, const std::string& why) {
    Status status;
    status.address = address;
    status.state = "ended";
    status.last_error = why;
    status.dialed_in = true;
    std::lock_guard<std::mutex> lock(mu_);
    depart(status);
  }

  // Streams that hosts had opened, and that have ended since the last call, and those
  // that were refused.
  [[nodiscard]] std::vector<Status> take_departed() {
    std::lock_guard<std::mutex> lock(mu_);
    return std::exchange(departed_, {});
  }

  [[nodiscard]] StageSeconds stage_seconds() const {
    std::lock_guard<std::mutex> lock(mu_);
    return stage_seconds_;
  }

  // Metrics of episodes, in JSON, since the last call.
  [[nodiscard]] std::vector<std::string> take_metrics() {
    std::lock_guard<std::mutex> lock(mu_);
    metrics_bytes_ = 0;
    return std::exchange(metrics_, {});
  }

  // Without actors that were removed.
  [[nodiscard]] std::vector<Status> status() const {
    std::lock_guard<std::mutex> lock(mu_);
    std::vector<Status> result;
    for (const Actor& actor : actors_) {
      if (!actor.removed) result.push_back(actor.status);
    }
    for (const Actor& guest : guests_) result.push_back(guest.status);
    return result;
  }

  [[nodiscard]] const Options& options() const { return options_; }

  [[nodiscard]] Rollouts rollouts() const {
    std::lock_guard<std::mutex> lock(mu_);
    return rollouts_;
  }

 protected:       // For tests, which bring a stream of their own.
  struct Actor {  // All but the thread guarded by mu_.
    Status status;
    bool removed = false;
    int64_t filling = 0;           // Rollouts that are begun, or taken, not delivered.
    std::function<void()> cancel;  // The stream that is under way.
    std::shared_ptr<grpc::Channel> channel;  // Of the stream that is under way.
    Clock::time_point since;                 // When its stream began.
    bool silent = false;                     // It took too long.
    std::thread thread;
  };

 private:
  // mu_ must be held for these.
  void start(Actor* actor) {
    actor->thread = std::thread([this, actor] { act(actor); });
  }
  static void cancel(Actor* actor) {
    if (actor->cancel) actor->cancel();
  }
  // What the actor has begun and will not deliver, counted as that.
  void give_back(Actor* actor, int64_t* count) {
    *count += std::exchange(actor->filling, 0);
    changed_.notify_all();
  }
  void depart(const Status& status) {
    if (!stopping_ && departed_.size() < kMaxDeparted) departed_.push_back(status);
  }
  void hang_up_on_silent() {
    const auto timeout = std::chrono::duration<double>(options_.welcome_timeout_s);
    for (std::list<Actor>* actors : {&actors_, &guests_}) {
      for (Actor& actor : *actors) {
        if (actor.status.state != "connecting" || Clock::now() - actor.since < timeout)
          continue;
        actor.silent = true;
        cancel(&actor);
      }
    }
  }
  // Whether a server is connected, and has not said Welcome yet.
  [[nodiscard]] bool makes_environments() const {
    return std::any_of(actors_.begin(), actors_.end(), [](const Actor& actor) {
      return actor.channel && actor.channel->GetState(false) == GRPC_CHANNEL_READY;
    });
  }
  [[nodiscard]] std::string silence() const {
    return "no environments came within " + seconds(options_.welcome_timeout_s) +
           " s (--env_timeout_seconds)";
  }
  [[nodiscard]] bool ends(const Actor& actor) const {
    return stopping_ || actor.removed;
  }
  [[nodiscard]] bool limited() const {
    return allowed_ != std::numeric_limits<int64_t>::max();
  }

  [[nodiscard]] static std::string seconds(double s) {
    std::ostringstream text;
    text << s;  // Without needless digits.
    return text.str();
  }

  void join() {
    // Nothing is added any more, so the list stays as it is.
    for (Actor& actor : actors_) {
      if (actor.thread.joinable()) actor.thread.join();
    }
  }

  // An actor's thread: streams, one after the other.
  void act(Actor* actor) {
    std::mt19937_64 random(
        reinterpret_cast<uintptr_t>(actor) ^
        static_cast<uint64_t>(Clock::now().time_since_epoch().count()));
    std::uniform_real_distribution<double> jitter(0.5, 1.5);
    double wait_s = 0.1;
    for (;;) {
      int64_t rollouts_before = 0;
      bool answered = true;
      std::string error;
      {
        std::lock_guard<std::mutex> lock(mu_);
        if (ends(*actor)) break;
        actor->status.state = "connecting";
        actor->since = Clock::now();
        actor->silent = false;
        rollouts_before = actor->status.rollouts;
      }
      try {
        stream(actor);
      } catch (const Closed&) {
        break;
      } catch (const Unreachable& e) {
        answered = false;
        error = e.what();
      } catch (const std::exception& e) {
        error = e.what();
      }
      std::unique_lock<std::mutex> lock(mu_);
      if (ends(*actor)) break;
      give_back(actor, &rollouts_.lost);
      if (actor->silent) error = silence();
      actor->status.last_error = error.substr(0, kMaxErrorBytes);
      ++actor->status.reconnects;
      // Unreachable after it was there: an environment may have killed it.
      if (answered || actor->status.state == "running") ++actor->status.failures;
      actor->status.state = "waiting to reconnect";
      if (actor->status.rollouts > rollouts_before) wait_s = 0.1;
      const auto until =
          Clock::now() + std::chrono::duration_cast<Clock::duration>(
                             std::chrono::duration<double>(wait_s * jitter(random)));
      wait(&lock, &changed_, nullptr, until, [&] { return ends(*actor); });
      wait_s = std::min(10.0, 2 * wait_s);
    }
    std::lock_guard<std::mutex> lock(mu_);
    give_back(actor, &rollouts_.ended);
    actor->status.state = "ended";
  }

  // One stream, from Hello to its end, which is always an exception.
  void stream(Actor* actor) {
    const bool tls =
        !options_.tls_ca.empty() && actor->status.address.rfind("unix:", 0) != 0;
    const auto credentials =
        tls ? grpc::SslCredentials(
                  {options_.tls_ca, options_.tls_key, options_.tls_cert})
            : grpc::InsecureChannelCredentials();
    const auto channel = make_channel(actor->status.address, credentials,
                                      static_cast<int>(options_.max_message_bytes));
    // As generated code would do it, but for responses that are not parsed yet.
    const grpc::internal::RpcMethod method(
        "/torchbeast.protocol.EnvironmentServer/Stream", nullptr,
        grpc::internal::RpcMethod::BIDI_STREAMING, channel);
    grpc::ClientContext context;
    const Reach reach(this, actor, &context, channel);
    using Factory =
        grpc::internal::ClientReaderWriterFactory<protocol::Request, grpc::ByteBuffer>;
    const std::unique_ptr<Stream> stream(
        Factory::Create(channel.get(), method, &context));
    try {
      converse(actor, stream.get(), stream.get());
    } catch (...) {
      context.TryCancel();
      (void)stream->Finish();
      throw;
    }
    // The other side has ended it. Always Finish(): the reason is there.
    const grpc::Status status = stream->Finish();
    const std::string why = status.ok() ? "the server ended the stream"
                                        : explain(status.error_message(), tls);
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE) throw Unreachable(why);
    throw std::runtime_error(why);
  }

  struct Unreachable : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

 protected:
  using Stream = grpc::ClientReaderWriterInterface<protocol::Request, grpc::ByteBuffer>;

  // Returns when the other side has ended the stream.
  void converse(Actor* actor, Writer* writer, Reader* reader) {
    protocol::Request request;
    request.mutable_hello()->set_version(kProtocolVersion);
    request.mutable_hello()->set_seed(options_.seed);
    {
      std::lock_guard<std::mutex> lock(mu_);
      request.mutable_hello()->set_stream(actor->status.stream);
      request.mutable_hello()->set_connection(actor->status.reconnects);
    }
    const auto response = std::make_shared<protocol::Response>();
    if (!writer->Write(request) || !read_response(reader, response.get())) return;
    check(response->welcome());
    Conversation(this, actor, writer, reader, response).run();
  }

 private:
  // Returns num_envs. What hosts' streams have together is at most max_envs.
  int64_t take_envs(Actor* actor, int64_t num_envs) {
    std::lock_guard<std::mutex> lock(mu_);
    int64_t left = options_.max_envs;
    for (const Actor& guest : guests_) left -= guest.status.num_envs;
    if (actor->status.dialed_in && num_envs > left) {
      throw std::runtime_error("the learner's memory is for " + std::to_string(left) +
                               " more environments, this stream has " +
                               std::to_string(num_envs));
    }
    return actor->status.num_envs = num_envs;
  }

  // What an actor does on one stream once the server has said Welcome: it asks for the
  // agent's outputs, sends their actions, takes steps, and delivers rollouts.
  class Conversation {
   public:
    Conversation(ActorPool* pool, Actor* actor, Writer* writer, Reader* reader,
                 std::shared_ptr<protocol::Response> welcome)
        : pool_(pool),
          options_(pool->options_),
          actor_(actor),
          writer_(writer),
          reader_(reader),
          response_(std::move(welcome)),
          spec_(decode_spec(response_->welcome().step())),
          action_spec_(decode_spec(response_->welcome().action())),
          num_envs_(pool->take_envs(actor, check_specs())),
          num_actions_(options_.burn_in + options_.unroll_length),
          rollout_(num_actions_, spec_, options_.burn_in + 1, options_.one_episode),
          waits_(find_waits()),
          width_(options_.one_episode || waits_ ? 1 : num_envs_),
          core_state_(for_each_environment(pool->initial_state_, num_envs_)) {
      for (int64_t e = 0; e < num_envs_; e += width_) {
        groups_.emplace_back().columns = {e, width_};
      }
    }

    // Returns when the other side has ended the stream.
    void run() {
      {
        std::lock_guard<std::mutex> lock(pool_->mu_);
        actor_->status.state = "running";
        actor_->status.environment = response_->welcome().environment();
        pool_->reached_ = true;
      }
      pool_->changed_.notify_all();
      take_step();
      check_step();
      inputs_ = std::make_shared<const Structure>(
          Structure{Kind::kTuple, {}, {*step_.structure, *core_state_.structure}});
      double rollout_queue = 0;  // Seconds since the step before.
      for (;;) {
        const auto filled_at = Clock::now();
        for (Group& group : groups_) {
          if (!waits(group)) advance(&group);
        }
        rollout_queue += internal::seconds_between(filled_at, Clock::now());
        CallSeconds seconds;
        encode_arrays({action_spec_.structure, infer(&seconds)},
                      request_.mutable_action());
        const auto asked_at = Clock::now();
        if (!writer_->Write(request_)) return;
        step_.leaves.clear();
        if (!read_response(reader_, response_.get())) return;
        const double environment_wait =
            internal::seconds_between(asked_at, Clock::now());
        take_step();
        count_step(seconds, environment_wait, std::exchange(rollout_queue, 0));
      }
    }

   private:
    // Rows that begin and end their rollouts together: all, or each alone. A
    // rollout has burn_in steps before the others, which repeat the one before; the
    // first one is filled whole.
    struct Group {
      Columns columns = {0, 0};
      int64_t t = -1;                       // The step that is written last, or none.
      Nest<Array> initial_core_state;       // Before step 0. [., num, ...]
      std::deque<Nest<Array>> core_states;  // Before each of the last steps.
    };

    // Returns the number of environments.
    [[nodiscard]] int64_t check_specs() const {
      const int64_t num_envs = response_->welcome().num_envs();
      if (spec_.structure->kind != Kind::kDict) {
        throw std::invalid_argument("the server's step is " +
                                    spec_.structure->describe() + ", expected a dict");
      }
      check_rows(spec_, num_envs);
      check_rows(action_spec_, num_envs);
      return num_envs;
    }

    // Returns the leaf of the step's entry "waits", if it has one.
    [[nodiscard]] std::optional<size_t> find_waits() const {
      const auto [child, leaf] = spec_.structure->find("waits");
      if (child == nullptr) return std::nullopt;
      if (child->kind == Kind::kLeaf &&
          spec_.leaves[leaf].dtype == DType{DType::kBool, 8} &&
          spec_.leaves[leaf].shape.rank() == 1) {
        return leaf;
      }
      throw std::invalid_argument("the server's waits is no bool [" +
                                  std::to_string(num_envs_) + "]");
    }

    // Whether the group, which then is one row, has no part in the newest step.
    [[nodiscard]] bool waits(const Group& group) const {
      if (!waits_) return false;
      const Array row = step_.leaves[*waits_].narrow(0, group.columns.begin, 1);
      return row.data.get()[0] != std::byte{0};
    }

    void check_step() const {
      if (options_.step.structure == nullptr) return;
      try {
        (void)options_.step.match(step_, /*batch_dim=*/0);
      } catch (const std::invalid_argument& e) {
        throw std::invalid_argument(std::string("the server's step differs: ") +
                                    e.what());
      }
    }

    void take_step() { step_ = decode_arrays(spec_, {response_, &response_->step()}); }

    // Returns the agent's actions for the newest step. Its other outputs go into the
    // rollouts.
    std::vector<Array> infer(CallSeconds* seconds) {
      Nest<Array> inputs{inputs_, {}};
      for (const Array& array : step_.leaves) {
        inputs.leaves.push_back(internal::as_one_step(array));
      }
      inputs.leaves.insert(inputs.leaves.end(), core_state_.leaves.begin(),
                           core_state_.leaves.end());
      const Nest<Array> result =
          pool_->inference_batcher_->compute(inputs, nullptr, seconds);
      const AgentOutputs outputs(result, action_spec_, *core_state_.structure);
      core_state_.leaves = outputs.core_state;
      for (Group& group : groups_) {
        if (group.t < 0 || waits(group)) continue;  // The action is ignored.
        rollout_.write_outputs(group.t, outputs.structure, outputs.leaves,
                               group.columns);
        group.core_states.push_back(state_of(group));
        const auto most = static_cast<size_t>(options_.burn_in + 1);
        if (group.core_states.size() > most) group.core_states.pop_front();
      }
      return outputs.action;
    }

    // Returns the group's part of the newest core_state. That of one row is a copy: a
    // row that waits for long would keep those of all environments.
    [[nodiscard]] Nest<Array> state_of(const Group& group) const {
      if (width_ == num_envs_) return core_state_;
      return core_state_.map([&](const Array& array) {
        const Columns columns = group.columns;
        return copied(heap_memory, array.narrow(1, columns.begin, columns.num));
      });
    }

    // Takes the newest step into the group's rollout. Delivers it if it is full, and
    // begins the next one.
    void advance(Group* group) {
      const Columns columns = group->columns;
      if (group->t < 0) {
        if (!begin()) return;
        group->initial_core_state = state_of(*group);
        group->core_states = {group->initial_core_state};
      }
      rollout_.write_step(++group->t, step_.leaves, columns);
      if (group->t == 0) return;
      if (options_.one_episode && rollout_.is_first(group->t, columns.begin)) {
        // Of an agent that had left: its rollout begins anew, until it has an episode.
        group->initial_core_state = state_of(*group);
        rollout_.write_step(group->t = 0, step_.leaves, columns);
        return;
      }
      const bool last =
          options_.one_episode && rollout_.is_last(group->t, columns.begin);
      if (group->t < num_actions_ && !last) return;
      rollout_.pad(group->t, columns);
      for (int64_t e = columns.begin; e < columns.begin + columns.num; ++e) {
        const Nest<Array> state = group->initial_core_state.map(
            [&](const Array& array) { return array.narrow(1, e - columns.begin, 1); });
        pool_->deliver(actor_, rollout_.of_environment(e, state));
      }
      group->t = -1;
      if (last || !begin()) return;  // What follows a last step is in no rollout.
      group->t = options_.burn_in;
      rollout_.begin_next(columns);
      group->initial_core_state = group->core_states.front();
    }

    // Waits until a rollout may be begun. Returns false instead if other rows fill
    // theirs meanwhile. Throws Closed if the actor ends before that.
    [[nodiscard]] bool begin() {
      if (num_taken_ > 0) {
        num_taken_ -= width_;
        return true;
      }
      const bool others = std::any_of(groups_.begin(), groups_.end(),
                                      [](const Group& group) { return group.t >= 0; });
      std::unique_lock<std::mutex> lock(pool_->mu_);
      Rollouts& rollouts = pool_->rollouts_;
      const auto allowed = [&] {
        const int64_t in_use = rollouts.begun - rollouts.lost - rollouts.ended;
        return pool_->ends(*actor_) || in_use < pool_->allowed_;
      };
      if (others && !allowed()) return false;
      wait(&lock, &pool_->changed_, nullptr, std::nullopt, allowed);
      if (pool_->ends(*actor_)) throw Closed("the actor ends");
      // Those of all rows, lest the first ones to move take what others are to begin.
      const int64_t num = pool_->limited() ? num_envs_ : width_;
      num_taken_ = num - width_;
      rollouts.begun += num;
      actor_->filling += num;
      return true;
    }

    void count_step(const CallSeconds& seconds, double environment_wait,
                    double rollout_queue) {
      const int64_t num_steps =
          width_ * std::count_if(groups_.begin(), groups_.end(),
                                 [&](const Group& group) { return !waits(group); });
      std::lock_guard<std::mutex> lock(pool_->mu_);
      for (const std::string& text : response_->metrics()) {
        if (pool_->metrics_.size() >= kMaxMetrics) break;
        if ((pool_->metrics_bytes_ += text.size()) > kMaxMetricsWaiting) break;
        pool_->metrics_.push_back(text);
      }
      actor_->status.steps += num_steps;
      pool_->stage_seconds_.inference_queue += seconds.queue;
      pool_->stage_seconds_.inference += seconds.evaluation;
      pool_->stage_seconds_.environment_wait += environment_wait;
      pool_->stage_seconds_.rollout_queue += rollout_queue;
    }

    ActorPool* const pool_;
    const Options& options_;
    Actor* const actor_;
    Writer* const writer_;
    Reader* const reader_;
    const std::shared_ptr<protocol::Response> response_;
    protocol::Request request_;
    const Nest<ArraySpec> spec_;  // A step's.
    const Nest<ArraySpec> action_spec_;
    const int64_t num_envs_;
    const int64_t num_actions_;          // A rollout's.
    Rollout rollout_;                    // All environments' rollouts.
    const std::optional<size_t> waits_;  // A leaf of the step.
    const int64_t width_;                // Environments of a group.
    std::vector<Group> groups_;
    int64_t num_taken_ = 0;   // Rollouts that rows may begin.
    Nest<Array> step_;        // The newest.
    Nest<Array> core_state_;  // Before it.
    std::shared_ptr<const Structure> inputs_;
  };

  void deliver(Actor* actor, const Nest<Array>& rollout) {
    {
      std::unique_lock<std::mutex> lock(mu_);
      wait(&lock, &changed_, nullptr, std::nullopt,
           [&] { return ends(*actor) || rollouts_.delivered < options_.max_rollouts; });
      if (ends(*actor)) throw Closed("the actor ends");
      ++rollouts_.delivered;  // Not later: only one may be the last.
      --actor->filling;
    }
    try {
      learner_queue_->enqueue(rollout, {});
    } catch (...) {
      {
        std::lock_guard<std::mutex> lock(mu_);
        --rollouts_.delivered;
        ++actor->filling;
      }
      changed_.notify_all();
      throw;
    }
    std::lock_guard<std::mutex> lock(mu_);
    ++actor->status.rollouts;
    actor->status.failures = 0;
  }

  // Makes stop() and remove() reach a stream for as long as it lasts.
  class Reach {
   public:
    Reach(ActorPool* pool, Actor* actor, grpc::ClientContext* context,
          std::shared_ptr<grpc::Channel> channel)
        : pool_(pool), actor_(actor) {
      std::lock_guard<std::mutex> lock(pool_->mu_);
      actor_->channel = std::move(channel);
      actor_->cancel = [context] { context->TryCancel(); };
      if (pool_->ends(*actor)) context->TryCancel();
    }
    Reach(const Reach&) = delete;
    Reach& operator=(const Reach&) = delete;
    ~Reach() {
      std::lock_guard<std::mutex> lock(pool_->mu_);
      actor_->cancel = nullptr;
      actor_->channel = nullptr;
    }

   private:
    ActorPool* const pool_;
    Actor* const actor_;
  };

  void check(const protocol::Welcome& welcome) const {
    const auto compare = [](const std::string& what, const std::string& learner,
                            const std::string& server) {
      if (learner == server) return;
      throw std::runtime_error(what + " differs: the learner has " + learner +
                               ", the server " + server);
    };
    compare("the protocol's version", std::to_string(kProtocolVersion),
            std::to_string(welcome.version()));
    if (!options_.observation_space.empty()) {
      compare("the observation space", options_.observation_space,
              welcome.observation_space());
    }
    if (!options_.action_space.empty()) {
      compare("the action space", options_.action_space, welcome.action_space());
    }
    if (welcome.num_envs() < 1 || welcome.num_envs() > kMaxEnvs) {
      throw std::runtime_error("the server has " + std::to_string(welcome.num_envs()) +
                               " environments for a stream, expected 1 to " +
                               std::to_string(kMaxEnvs));
    }
  }

  static void check_rows(const Nest<ArraySpec>& spec, int64_t num_envs) {
    for (size_t i = 0; i < spec.leaves.size(); ++i) {
      const Dims& shape = spec.leaves[i].shape;
      if (shape.rank() >= 1 && shape.rank() < kMaxRank && shape[0] == num_envs)
        continue;
      throw std::invalid_argument(
          spec.structure->leaf_name(i) + " has shape " + shape.str() + ", expected [" +
          std::to_string(num_envs) + ", ...]: one row for each environment");
    }
  }

  // [., 1, ...] repeated to [., E, ...], without a copy.
  static Nest<Array> for_each_environment(const Nest<Array>& state, int64_t num_envs) {
    return state.map([&](Array array) {
      array.shape[1] = num_envs;
      array.strides[1] = 0;
      return array;
    });
  }

  const Options options_;
  const std::shared_ptr<LearnerQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  const Nest<Array> initial_state_;

  mutable std::mutex mu_;
  std::condition_variable changed_;   // stopping_, reached_ or an actor's `removed` is
                                      // set, rollouts_.delivered shrank, allowed_ or
                                      // what was given back grew.
  std::list<Actor> actors_;           // Guarded by mu_. Shrinks only in add().
  std::list<Actor> guests_;           // Guarded by mu_. Streams that hosts opened.
  std::vector<Status> departed_;      // Guarded by mu_.
  StageSeconds stage_seconds_;        // Guarded by mu_.
  int64_t num_added_ = 0;             // Guarded by mu_.
  Rollouts rollouts_;                 // Guarded by mu_.
  int64_t allowed_;                   // Guarded by mu_. Rollouts to begin in all.
  std::vector<std::string> metrics_;  // Guarded by mu_.
  size_t metrics_bytes_ = 0;          // Guarded by mu_. The size of metrics_.
  bool running_ = false;              // Guarded by mu_.
  bool stopping_ = false;             // Guarded by mu_.
  bool reached_ = false;              // Guarded by mu_. A server has answered.
};

}  // namespace torchbeast
