"""What carries the programs and the agents. Forking a program needs no edit in here.

What to open for what, in the order of the way from an environment to a gradient:

    environment.py    a step: what each field means, and when an episode ends
    spaces.py         which observations and actions are supported; masks.py: when
    vector.py         environments that step together; how they begin anew
    pettingzoo.py     environments of several agents; turns.py, seats.py, union.py
    actors.py         MonoBeast's actor processes, and the shared memory they fill
    rollouts.py       what a rollout holds
    agents.py         what all agents share; policies.py: several agents as one
    actor_critic.py   what SAC and TD3 share; q_learning.py: R2D2 and PQN
    networks.py       encoder, LSTM and heads; encoders.py: observations to features
    distributions.py  policies over any space of actions
    learner.py        an update: learn, count, publish, evaluate
    gradients.py      a loss's gradients, summed over learners; minibatches.py: PPO's
    graphs.py         gradient steps as CUDA graphs; devices.py: copies to GPUs
    normalization.py  running statistics of observations and rewards
    replay.py         what was seen before, for targets.py and V-trace
    ranks.py          several learners: who votes, what is summed
    run.py            a run's directory and counters; checkpoint.py: model.tar
    log_writer.py     logs.csv, and what its columns mean; tracking.py: W&B, MLflow
    program.py        a program's command line; flags.py: flags that all have
    play.py           --mode test; evaluation.py: the same beside training
    versus.py         who plays against an agent; ratings.py: how well it does
    process.py        signals, and how processes end; messages.py: what they say

    launch.py, tune.py, plot.py, export.py    commands of their own
    remote/           PolyBeast's servers, streams and protocol
    warp/             WarpBeast's environments: autoreset, checks, kernels
"""
