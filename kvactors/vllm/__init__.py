"""What connects kvactors to vLLM. This package loads without vLLM; its modules import vLLM when they are called."""
