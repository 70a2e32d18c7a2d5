"""`--standalone`: a folder of kernel text that needs only torch and the CuTe DSL, not mokgen.

The device modules a kernel uses are copied beside it under another package name; nothing changes in them but the
import lines that named mokgen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from mokgen.errors import TemplateError

SOURCE_PACKAGE = "mokgen.device"
COPY_PACKAGE = "mokgen_device"  # not `mokgen`: an installed mokgen and the copy may meet in one process

README = '''# {stem}: kernels without mokgen

`{package}/` holds copies of the device modules these kernels use. Needed: torch, nvidia-cutlass-dsl=={dsl_version},
apache-tvm-ffi. `ARGUMENTS` at the top of each kernel file is the call's argument table. Compile, with no GPU needed,
and call on the GPU; run this in the folder:

```python
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
{imports}

TYPES = {{
    "bf16": cutlass.BFloat16,
    "fp32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "uint8": cutlass.Uint8,
}}


def compile_kernel(module, arch="{arch}"):
    """Compile `module.launch` for tensors of the shapes in `module.ARGUMENTS`; equal names are equal extents."""
    symbols, fakes = {{}}, []
    for _, dtype, shape in module.ARGUMENTS:
        if shape is None:
            fakes.append(TYPES[dtype](0))
            continue
        extents = tuple(n if isinstance(n, int) else symbols.setdefault(n, cute.sym_int(symbol=n)) for n in shape)
        order = tuple(reversed(range(len(shape))))
        fakes.append(make_fake_compact_tensor(TYPES[dtype], extents, stride_order=order, assumed_align=16))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(module.launch, *fakes, stream, options=f"--gpu-arch {{arch}} --enable-tvm-ffi")


{calls}
```

Then call each with torch CUDA tensors and numbers in the order of its table; it runs on torch's current stream. Order
of a forward: {order}.
'''


def standalone(
    kernels: Mapping[str, str], modules: Mapping[str, str], stem: str, arch: str, dsl_version: str
) -> dict[str, str]:
    """Files of the folder by relative name.

    `kernels` is the text of the kernel modules by file name, in launch order; `modules` the text of every device module
    they use by dotted name (`mokgen.device`, `mokgen.device.sync`, ...), packages included.
    """
    files = {name: rewrite_imports(text, name) for name, text in kernels.items()}
    packages = {name for name in modules if any(other.startswith(name + ".") for other in modules)} | {SOURCE_PACKAGE}
    for name, text in modules.items():
        inside = name.split(".")[2:]
        place = "/".join([COPY_PACKAGE, *inside])
        files[f"{place}/__init__.py" if name in packages else f"{place}.py"] = rewrite_imports(text, name)
    names = [name.removesuffix(".py") for name in kernels]
    files["README.md"] = README.format(
        stem=stem,
        package=COPY_PACKAGE,
        dsl_version=dsl_version,
        arch=arch,
        imports="\n".join(f"import {name}" for name in sorted(names)),
        calls="\n".join(f"{name}_kernel = compile_kernel({name})" for name in names),
        order=", ".join(names),
    )
    return files


def rewrite_imports(text: str, name: str) -> str:
    """The same text with its imports of mokgen.device taken from the copy."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named = [alias for alias in node.names if _ours(alias.name)]
            if any(alias.asname is None for alias in named):
                raise TemplateError(
                    f"`import {named[0].name}` binds the name mokgen", where=f"{name}:{node.lineno}", hint="use `from`"
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            named = [alias for alias in node.names if _ours(node.module or "")]
            if node.module == "mokgen" and any(alias.name == "device" for alias in node.names):
                raise TemplateError(
                    "`from mokgen import device` cannot be copied",
                    where=f"{name}:{node.lineno}",
                    hint=f"import from {SOURCE_PACKAGE}",
                )
        else:
            continue
        if named:
            for index in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[index] = re.sub(rf"\b{re.escape(SOURCE_PACKAGE)}\b", COPY_PACKAGE, lines[index])
    return "".join(lines)


def _ours(module: str) -> bool:
    return module == SOURCE_PACKAGE or module.startswith(SOURCE_PACKAGE + ".")
