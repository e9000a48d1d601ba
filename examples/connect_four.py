"""An opponent for PettingZoo's connect four, which looks one move ahead:

python -m monobeast --env pettingzoo.classic.connect_four_v3 --mode test \\
    --opponent examples.connect_four:lookahead
"""

import numpy as np

DIRECTIONS = (0, 1), (1, 0), (1, 1), (1, -1)


def lookahead(observation, legal, random):
    """Wins if it can, else prevents that the other one wins, else moves at random.

    observation: {"observation": [6, 7, 2]}, its own pieces and the other's; legal: the
    columns that are not full. Returns a column.
    """
    pieces = np.asarray(observation["observation"])
    for player in (0, 1):
        for column in legal:
            if wins(pieces, player, column):
                return column
    return int(random.choice(legal))


def wins(pieces, player, column):
    """Tells whether a player's piece that falls into the column makes four in a row."""
    row = int((pieces[:, column].sum(-1) == 0).sum()) - 1  # Row 0 is at the top.
    own = pieces[..., player] > 0

    def num(down, right):
        """The player's pieces in a row beside the new one, in a direction."""
        i, j, n = row + down, column + right, 0
        while 0 <= i < own.shape[0] and 0 <= j < own.shape[1] and own[i, j]:
            i, j, n = i + down, j + right, n + 1
        return n

    return any(num(i, j) + num(-i, -j) >= 3 for i, j in DIRECTIONS)
