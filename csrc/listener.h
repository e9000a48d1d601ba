// Listener: hosts of environments open streams to this learner's ActorPool.

#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/method_handler.h>
#include <grpcpp/impl/codegen/rpc_service_method.h>
#include <grpcpp/resource_quota.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "actor_pool.h"
#include "door.h"
#include "torchbeast.pb.h"
#include "wire.h"

namespace torchbeast {

// Listens from its construction on. The destructor ends all streams and returns when
// they have ended, for which the pool has to be stopped, and its batcher and queue
// closed.
class Listener {
 public:
  // Listens at the pool's address, with its TLS. Throws runtime_error if it cannot.
  explicit Listener(ActorPool* pool) : service_(pool) {
    const ActorPool::Options& options = pool->options();
    const std::string& address = options.listen;
    grpc::ServerBuilder builder;
    auto credentials = grpc::InsecureServerCredentials();
    const bool is_unix = address.rfind("unix:", 0) == 0;
    if (!options.tls_ca.empty() && !is_unix) {
      grpc::SslServerCredentialsOptions tls(
          GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
      tls.pem_root_certs = options.tls_ca;
      tls.pem_key_cert_pairs.push_back({options.tls_key, options.tls_cert});
      credentials = grpc::SslServerCredentials(tls);
    }
    int port = -1;
    std::unique_ptr<Door::Acceptor> acceptor;
    if (is_unix) {
      builder.AddListeningPort(address, credentials, &port);
    } else {
      using Builder = grpc::ServerBuilder::experimental_type;
      acceptor = builder.experimental().AddExternalConnectionAcceptor(
          Builder::ExternalConnectionType::FROM_FD, credentials);
      door_ = std::make_unique<Door>(address, max_connections(options.max_streams));
    }
    builder.RegisterService(&service_);
    builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
    // One thread for each stream, and some that refuse what is too many.
    builder.SetResourceQuota(grpc::ResourceQuota().SetMaxThreads(
        static_cast<int>(options.max_streams) + kSpareThreads));
    // As torchbeast/remote/protocol.py and server.py have them, with the same reasons.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1);
    builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 5'000);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 60'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                               5'000);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      throw std::runtime_error("cannot listen at " + address);
    }
    if (door_ == nullptr) return;
    door_->open(std::move(acceptor), [pool](auto&& peer, auto&& why) {
      pool->refuse(peer, why + " (--max_streams)");
    });
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  ~Listener() {
    door_ = nullptr;
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  }

 private:
  static constexpr int kSpareThreads = 64;

  // Each stream has one of its own; as many more may be in their handshakes.
  static int64_t max_connections(int64_t max_streams) { return 2 * max_streams + 64; }

  using Request = protocol::Request;
  using Stream = grpc::ServerReaderWriter<Request, grpc::ByteBuffer>;

  // As generated code would be, but for responses that are not parsed yet.
  class Service : public grpc::Service {
   public:
    explicit Service(ActorPool* pool) : pool_(pool) {
      add("/torchbeast.protocol.Learner/Stream", &Service::stream);
      add("/torchbeast.protocol.EnvironmentServer/Stream", &Service::refuse);
    }

   private:
    using Method = grpc::Status (Service::*)(grpc::ServerContext*, Stream*);

    void add(const char* name, Method method) {
      AddMethod(new grpc::internal::RpcServiceMethod(
          name, grpc::internal::RpcMethod::BIDI_STREAMING,
          new grpc::internal::BidiStreamingHandler<Service, grpc::ByteBuffer, Request>(
              [method](Service* self, grpc::ServerContext* context, Stream* stream) {
                return (self->*method)(context, stream);
              },
              this)));
    }

    grpc::Status stream(grpc::ServerContext* context, Stream* stream) {
      std::string peer = context->peer();
      peer = peer.substr(peer.find(':') + 1);  // "ipv4:10.0.0.1:40000"
      return pool_->accept(peer, stream, stream, [context] { context->TryCancel(); });
    }

    grpc::Status refuse(grpc::ServerContext* /*context*/, Stream* /*stream*/) {
      return {grpc::StatusCode::FAILED_PRECONDITION,
              "this is a learner (--listen), expected an environment server"};
    }

    ActorPool* const pool_;
  };

  Service service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Door> door_;  // But for "unix:path", which only this host can reach.
};

}  // namespace torchbeast
