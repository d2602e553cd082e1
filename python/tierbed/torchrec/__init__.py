"""TorchRec's models on a store: its modules are replaced, its configs and batches are taken.

:func:`replace` puts collections over a store in place of those of a model that exists;
:func:`from_configs` makes one for a model that is built. Both fulfil TorchRec's interfaces: they
return its ``KeyedTensor`` and ``JaggedTensor``, and ``embedding_bag_configs()`` returns what was
given. TorchRec is imported by the first call, and is no dependency of Tierbed.

:func:`load_state_dict` and :func:`load_checkpoint` bring in what TorchRec's model saved,
:func:`full_state_dict` and :func:`save_checkpoint` write what it loads. They need torch alone.
"""

from __future__ import annotations

from tierbed.torchrec.building import from_configs, replace
from tierbed.torchrec.checkpoints import load_checkpoint, save_checkpoint
from tierbed.torchrec.states import full_state_dict, load_state_dict

__all__ = [
    "from_configs",
    "full_state_dict",
    "load_checkpoint",
    "load_state_dict",
    "replace",
    "save_checkpoint",
]
