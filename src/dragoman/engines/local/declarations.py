"""The part of llama.cpp's C API that is used here: structs, functions, and defaults that show the layout.

For xllamacpp 2026.10.11549; `binding` compares it with what is installed.
"""

from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from dragoman.engines.local import native_log


class ModelParams(Structure):
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("reserved", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


_TOKEN, _PTR = c_int32, c_void_p
Signature = tuple[Any, ...]

# These let other Python threads run meanwhile.
SLOW: dict[str, Signature] = {
    "backend_init": (None,),
    "model_load_from_file": (_PTR, c_char_p, ModelParams),
    "model_free": (None, _PTR),
    "init_from_model": (_PTR, _PTR, ContextParams),
    "free": (None, _PTR),
    "decode": (c_int32, _PTR, Batch),
    "synchronize": (None, _PTR),
    "adapter_lora_init": (_PTR, _PTR, c_char_p),
    "state_seq_get_size": (c_size_t, _PTR, c_int32),
    "state_seq_get_data": (c_size_t, _PTR, _PTR, c_size_t, c_int32),
    "state_seq_set_data": (c_size_t, _PTR, _PTR, c_size_t, c_int32),
    "tokenize": (c_int32, _PTR, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
}
# These take microseconds. Giving up the interpreter lock around them would hand it to the event loop's
# thread, which may keep it for milliseconds while the cores wait.
QUICK: dict[str, Signature] = {
    "model_default_params": (ModelParams,),
    "context_default_params": (ContextParams,),
    "model_get_vocab": (_PTR, _PTR),
    "model_meta_val_str": (c_int32, _PTR, c_char_p, c_char_p, c_size_t),
    "model_meta_key_by_index": (c_int32, _PTR, c_int32, c_char_p, c_size_t),
    "model_meta_count": (c_int32, _PTR),
    "model_desc": (c_int32, _PTR, c_char_p, c_size_t),
    "model_n_ctx_train": (c_int32, _PTR),
    "model_n_embd": (c_int32, _PTR),
    "model_n_head": (c_int32, _PTR),
    "model_n_head_kv": (c_int32, _PTR),
    "model_n_layer": (c_int32, _PTR),
    "model_n_params": (c_uint64, _PTR),
    "model_size": (c_uint64, _PTR),
    "model_has_encoder": (c_bool, _PTR),
    "model_is_recurrent": (c_bool, _PTR),
    "model_is_hybrid": (c_bool, _PTR),
    "vocab_n_tokens": (c_int32, _PTR),
    "vocab_is_eog": (c_bool, _PTR, _TOKEN),
    "vocab_get_attr": (c_int, _PTR, _TOKEN),
    "vocab_bos": (_TOKEN, _PTR),
    "vocab_eos": (_TOKEN, _PTR),
    "vocab_fim_pre": (_TOKEN, _PTR),
    "vocab_fim_suf": (_TOKEN, _PTR),
    "vocab_fim_mid": (_TOKEN, _PTR),
    "vocab_get_add_bos": (c_bool, _PTR),
    "token_to_piece": (c_int32, _PTR, _TOKEN, c_char_p, c_int32, c_int32, c_bool),
    "n_ctx_seq": (c_uint32, _PTR),
    "get_logits": (_PTR, _PTR),
    "get_embeddings": (_PTR, _PTR),
    "get_memory": (_PTR, _PTR),
    "memory_clear": (None, _PTR, c_bool),
    "memory_seq_rm": (c_bool, _PTR, c_int32, c_int32, c_int32),
    "memory_seq_pos_max": (c_int32, _PTR, c_int32),
    "memory_seq_cp": (None, _PTR, c_int32, c_int32, c_int32, c_int32),
    "set_adapters_lora": (c_int32, _PTR, POINTER(c_void_p), c_size_t, POINTER(c_float)),
    "set_abort_callback": (None, _PTR, c_void_p, c_void_p),
    "log_set": (None, native_log.Callback, c_void_p),
}

MODEL_DEFAULTS = {
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "ctx_other": None,
}
