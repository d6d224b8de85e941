"""Gradients that travel under a codec (`netstorm.compression`): DDP's by a communication hook, or by a
setting in scripts that stay unedited; DiLoCo's outer gradients.

```python
model.register_comm_hook(CodecHookState("int8", model), codec_hook)
```
"""

from __future__ import annotations

from netstorm.frontends.torch.gradient_codecs.hook import CodecHookState, codec_hook

__all__ = ["CodecHookState", "codec_hook"]
