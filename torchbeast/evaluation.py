"""Episodes beside training, as the agent is judged: --eval_interval_steps.

A process of its own, at a low priority, plays them with the weights it was sent last.
Training never waits for it: while it plays, no weights are sent.
"""

import contextlib
import copy
import os
import threading
import traceback

import numpy as np
import torch
import torch.multiprocessing as mp

from torchbeast import calls, play, ratings
from torchbeast.checkpoint import from_bytes, to_bytes
from torchbeast.messages import log, setup_logging
from torchbeast.policies import make_judged
from torchbeast.process import end_group, kill_group, lead_group, signals_blocked
from torchbeast.seeds import derive_seed

END_S = 10  # The process's time to close its environment.


class Evaluator:
    """Sends weights to the process that plays, and takes the returns.

    offer() and take() may be called by one thread at a time; they do not wait for a
    game. What goes wrong in the process ends the evaluation, not the run. close() has
    the process close its environment, and ends it with all that it started; it also
    ends when the learner is gone.
    """

    def __init__(self, create_env, flags, step):
        self._interval = flags.eval_interval_steps
        self._step = step  # The step of the last evaluation.
        self._idle = True
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_evaluate, args=(create_env, flags, theirs), name="evaluation"
        )
        with signals_blocked():
            self._process.start()
        theirs.close()

    def offer(self, step, net):
        """Has the network's weights evaluated, if that is due and none are yet."""
        if not self._idle or step // self._interval == self._step // self._interval:
            return
        self._step, self._idle = step, False
        weights = {k: x.detach().cpu() for k, x in net.state_dict().items()}
        data = to_bytes({"step": step, "weights": weights})
        # The process may still be starting, and a pipe holds less than a network.
        threading.Thread(target=self._send, args=(data,), daemon=True).start()

    def _send(self, data):
        with contextlib.suppress(OSError):  # It has ended: take() finds out.
            self._connection.send_bytes(data)

    def take(self):
        """Returns what is logged of the evaluation that has ended since the last call,
        {name: number}, or None."""
        if self._process is None:
            return None
        # Before poll(): what an environment has forked keeps a dead one's pipe open.
        ended = not self._process.is_alive()
        try:
            if self._connection.poll():
                result = self._connection.recv()
            elif not ended:
                return None
            else:
                raise EOFError
        except (EOFError, OSError):
            self._process.join(timeout=1)
            result = f"its process has ended, exit code {self._process.exitcode}"
        if isinstance(result, str):
            log.error("evaluation ends: %s", result.rstrip())
            self.close()
            return None
        self._idle = True
        returns, more = result
        mean = float(np.mean(returns))
        text = "".join(f", {name} {x:.4g}" for name, x in more.items())
        what = f"{len(returns)} episodes, mean return {mean:.2f}{text}"
        log.info(f"step {self._step:,}: {what}")
        return {"eval_return": mean, "eval_step": self._step, **more}

    def close(self):
        if self._process is not None:
            self._connection.close()
            self._process.join(END_S)
            kill_group(self._process)
            self._process.join()
            self._process, self._idle = None, False


def _evaluate(create_env, flags, connection):
    lead_group()
    os.nice(5)  # Not more: on busy cores it would not get far.
    setup_logging()
    torch.set_num_threads(1)
    newest, arrived = [], threading.Event()

    def receive():
        while True:
            try:
                newest[:] = [connection.recv_bytes()]
            except (EOFError, OSError):  # The learner is gone, or wants no more.
                newest[:] = [None]
            arrived.set()
            if newest == [None]:
                calls.end_process()

    threading.Thread(target=receive, daemon=True).start()
    calls.watch(flags.env, flags.env_timeout_seconds, connection.send)
    try:
        flags = copy.copy(flags)
        seed = derive_seed(flags.seed, flags.eval_interval_steps)
        torch.manual_seed(seed)
        env = calls.create(create_env, flags, 1, seed=seed)
        with contextlib.closing(env):
            agent = make_judged(flags, env)
            agent.net.eval()
            if env.opponents is not None:
                rival = make_judged(flags, env)
                rival.net.eval()
                rated = ratings.Ratings(flags, env, agent, rival)
            while arrived.wait():
                arrived.clear()
                if (data := newest[0]) is None:
                    break
                data = from_bytes(data)
                flags.seed = derive_seed(seed, data["step"])  # Other games each time.
                if env.opponents is not None:
                    connection.send(rated.add(data["step"], data["weights"]))
                    continue
                agent.net.load_state_dict(data["weights"])
                policy = play.Policy(agent, env, flags.test_actions)
                returns = [x for x, _ in play.episodes(flags, env, policy)]
                connection.send((returns, {}))
    except calls.NotWanted:
        pass
    except BaseException:  # sys.exit() in an environment, too.
        connection.send(traceback.format_exc())
    end_group()
