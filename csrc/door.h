// Door: a TCP port, whose connections go to a gRPC server, but for those that are too
// many.

#pragma once

#include <grpcpp/grpcpp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torchbeast {

// Listens from its construction on. open() has a thread accept connections until the
// destructor, which joins it. Those beyond max_connections at a time, and those that
// would take one of the process's last descriptors, are closed at once and told of.
//
// gRPC's own port takes whatever comes, a descriptor each until its handshake has timed
// out. When none is left, this process's files cannot be opened, and gRPC 1.51 stops
// listening for good.
class Door {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  // Throws runtime_error if it cannot listen at the address, "host:port".
  Door(const std::string& address, int64_t max_connections)
      : max_connections_(static_cast<size_t>(max_connections)) {
    const size_t colon = address.rfind(':');
    std::string host = address.substr(0, colon);
    if (host.size() > 1 && host.front() == '[') host = host.substr(1, host.size() - 2);
    const bool anywhere = host == "0.0.0.0" || host == "::";
    std::string error;
    if (anywhere) error = listen("::", address.substr(colon + 1));  // IPv4, too.
    if (!anywhere || ports_.empty()) error = listen(host, address.substr(colon + 1));
    if (ports_.empty()) {
      throw std::runtime_error("cannot listen at " + address + ": " + error);
    }
    const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake < 0) throw std::runtime_error(std::strerror(errno));
    wake_ = std::make_unique<File>(wake);
  }
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;
  ~Door() {
    if (!thread_.joinable()) return;
    const uint64_t one = 1;
    (void)!write(wake_->fd, &one, sizeof(one));
    thread_.join();
  }

  // Called, in the thread, for a connection that is closed.
  using Refused = std::function<void(const std::string& peer, const std::string& why)>;

  // acceptor: of a server that has started.
  void open(std::unique_ptr<Acceptor> acceptor, Refused refused) {
    acceptor_ = std::move(acceptor);
    refused_ = std::move(refused);
    thread_ = std::thread([this] { run(); });
  }

 private:
  static constexpr int kSpareFiles = 64;  // For this process's own.

  struct File {
    explicit File(int file) : fd(file) {}
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() { close(fd); }
    const int fd;
  };

  // At every address of the host. Returns what went wrong last.
  std::string listen(const std::string& host, const std::string& port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int code = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
    if (code != 0) return gai_strerror(code);
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
    std::string error;
    for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
      const int type = a->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC;
      auto file = std::make_unique<File>(socket(a->ai_family, type, a->ai_protocol));
      const auto set = [&](int level, int name, int value) {
        (void)setsockopt(file->fd, level, name, &value, sizeof(value));
      };
      set(SOL_SOCKET, SO_REUSEADDR, 1);
      if (a->ai_family == AF_INET6) set(IPPROTO_IPV6, IPV6_V6ONLY, host != "::");
      set(IPPROTO_TCP, TCP_NODELAY,
          1);  // Connections inherit these, as gRPC sets them.
      set(IPPROTO_TCP, TCP_USER_TIMEOUT, 20'000);
      if (bind(file->fd, a->ai_addr, a->ai_addrlen) == 0 &&
          ::listen(file->fd, SOMAXCONN) == 0) {
        ports_.push_back(std::move(file));
      } else {
        error = std::strerror(errno);
      }
    }
    return error;
  }

  void run() {
    std::vector<pollfd> polled{{wake_->fd, POLLIN, 0}};
    for (const auto& port : ports_) polled.push_back({port->fd, POLLIN, 0});
    for (;;) {
      if (poll(polled.data(), polled.size(), -1) < 0) continue;  // A signal.
      if (polled[0].revents != 0) return;
      for (size_t i = 1; i < polled.size(); ++i) {
        if (polled[i].revents == 0) continue;
        const int fd =
            accept4(polled[i].fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
          admit(polled[i].fd, fd);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
          (void)poll(polled.data(), 1, 100);  // It may get better; the others wait.
        }
      }
    }
  }

  void admit(int port, int fd) {
    rlimit limit{};
    const bool limited = getrlimit(RLIMIT_NOFILE, &limit) == 0;
    // A new descriptor has the lowest free number.
    const bool last =
        limited && static_cast<rlim_t>(fd) + kSpareFiles >= limit.rlim_cur;
    struct stat of{};
    if (last || is_full() || fstat(fd, &of) != 0) {
      const std::string peer = peer_of(fd);
      close(fd);
      return refused_(peer, last ? "too many open files"
                                 : "too many connections, there are " +
                                       std::to_string(open_.size()) + " already");
    }
    open_[fd] = of.st_ino;
    Acceptor::NewConnectionParameters parameters;
    parameters.listener_fd = port;
    parameters.fd = fd;
    acceptor_->HandleNewConnection(&parameters);
  }

  // gRPC closes connections, and says nothing of it: their numbers are free again, or
  // of other files.
  bool is_full() {
    if (open_.size() < max_connections_) return false;
    for (auto it = open_.begin(); it != open_.end();) {
      struct stat now{};
      const bool same = fstat(it->first, &now) == 0 && now.st_ino == it->second;
      it = same ? std::next(it) : open_.erase(it);
    }
    return open_.size() >= max_connections_;
  }

  // "10.0.0.1:40000", "[::1]:40000"
  static std::string peer_of(int fd) {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    char host[NI_MAXHOST] = "";
    char port[NI_MAXSERV] = "";
    auto* a = reinterpret_cast<sockaddr*>(&address);
    if (getpeername(fd, a, &size) != 0 ||
        getnameinfo(a, size, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
      return "";  // It has left.
    }
    const std::string name = host;
    const std::string v4 = "::ffff:";
    if (name.rfind(v4, 0) == 0) return name.substr(v4.size()) + ":" + port;
    const bool v6 = name.find(':') != std::string::npos;
    return (v6 ? "[" + name + "]" : name) + ":" + port;
  }

  const size_t max_connections_;
  std::vector<std::unique_ptr<File>> ports_;
  std::unique_ptr<File> wake_;
  std::unique_ptr<Acceptor> acceptor_;
  Refused refused_;
  std::unordered_map<int, ino_t> open_;  // Inodes of connections. Only of the thread.
  std::thread thread_;
};

}  // namespace torchbeast
