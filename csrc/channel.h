// A channel to an environment server, and what comes through it.

#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/sync_stream.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "torchbeast.pb.h"
#include "wire.h"

namespace torchbeast {

inline std::shared_ptr<grpc::Channel> make_channel(
    const std::string& address,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    int max_message_bytes) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(max_message_bytes);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // Not what http_proxy is for.
  // No compression: a few bytes could become any number of them.
  arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  // Each attempt connects anew: waiting is done in ActorPool.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A host that is gone without a word, as when its power fails, is noticed.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // In a long step, too.
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

// gRPC does not say whose fault it is.
inline std::string explain(const std::string& error, bool tls) {
  const auto has = [&](const char* text) {
    return error.find(text) != std::string::npos;
  };
  std::string text;
  if (has("certificate verify failed")) {
    text =
        "the server's certificate is not signed by tls_ca, has expired, or is no "
        "server's";
  } else if (has("wrong version number")) {
    text = "the server speaks no TLS";
  } else if (has("failed to connect") && has("Socket closed")) {
    text = tls ? "the server hangs up: its log says if it refuses tls_cert"
               : "the server hangs up: does it expect TLS?";
  } else if (has("larger than max")) {
    text =
        "the server's step is larger than this learner takes: it has another "
        "environment, or too many of them";
  } else if (tls && has("empty address list")) {
    text = "tls_cert and tls_key are not a certificate and its key, in PEM";
  }
  return text.empty() ? error : text + " (" + error + ")";
}

struct HostError : std::runtime_error {  // In the host's words.
  using std::runtime_error::runtime_error;
};

// Looks at what parsing would cost before it parses. False if the other side has ended
// the stream.
inline bool read_response(grpc::internal::ReaderInterface<grpc::ByteBuffer>* reader,
                          protocol::Response* response) {
  grpc::ByteBuffer bytes;
  if (!reader->Read(&bytes)) return false;
  // A reader each, as they end in bytes that cannot be read again.
  grpc::ProtoBufferReader first(&bytes);
  check_size(&first);
  grpc::ProtoBufferReader second(&bytes);
  if (!response->ParseFromZeroCopyStream(&second)) {
    throw std::runtime_error("the server sent a message that cannot be parsed");
  }
  if (response->has_error()) {
    const char* reason = response->error().c_str();  // As what() ends it.
    throw HostError(*reason == 0 ? "the host gave no reason" : reason);
  }
  return true;
}

}  // namespace torchbeast
