"""Jagged tensors: ids of batches, and the vectors of their lookups.

The layout is TorchRec's: ``values`` holds the ids of all bags, feature by feature and within a
feature sample by sample; bag ``f * B + b`` is ``values[offsets[f*B+b] : offsets[f*B+b+1]]``.
The methods are TorchRec's, too. TorchRec itself is not needed; its own ``KeyedJaggedTensor`` is
accepted wherever ours is.
"""

from tierbed.jagged.accepted import as_kjt, is_kjt
from tierbed.jagged.keyed import KeyedJaggedTensor
from tierbed.jagged.pooled import KeyedTensor
from tierbed.jagged.single import JaggedTensor, UnpooledRows

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "UnpooledRows", "as_kjt", "is_kjt"]
