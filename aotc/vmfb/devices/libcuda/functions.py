"""The functions of the CUDA driver that are called, with the types of their arguments."""

from __future__ import annotations

from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

_HANDLE, _OUT = c_void_p, POINTER(c_void_p)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuModuleLoadData": (_OUT, c_void_p),
    "cuModuleUnload": (_HANDLE,),
    "cuModuleGetFunction": (_OUT, _HANDLE, c_char_p),
    "cuFuncSetAttribute": (_HANDLE, c_int, c_int),
    "cuTensorMapEncodeIm2col": (c_void_p, c_int, c_uint, *[c_void_p] * 5, c_uint, c_uint, c_void_p, *[c_int] * 4),
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint, c_void_p, *[c_void_p] * 4, *[c_int] * 4),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemHostAlloc": (_OUT, c_size_t, c_uint),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, _HANDLE),
    "cuStreamCreate": (_OUT, c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamQuery": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
    "cuEventCreate": (_OUT, c_uint),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventQuery": (_HANDLE,),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuMemcpyPeerAsync": (c_uint64, _HANDLE, c_uint64, _HANDLE, c_size_t, _HANDLE),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuCtxEnablePeerAccess": (_HANDLE, c_uint),
    "cuGraphCreate": (_OUT, c_uint),
    "cuGraphAddKernelNode_v2": (_OUT, _HANDLE, c_void_p, c_size_t, c_void_p),
    "cuGraphKernelNodeSetAttribute": (_HANDLE, c_int, c_void_p),
    "cuGraphAddMemcpyNode": (_OUT, _HANDLE, c_void_p, c_size_t, c_void_p, _HANDLE),
    "cuGraphAddEmptyNode": (_OUT, _HANDLE, c_void_p, c_size_t),
    "cuGraphExecKernelNodeSetParams_v2": (_HANDLE, _HANDLE, c_void_p),
    "cuGraphExecMemcpyNodeSetParams": (_HANDLE, _HANDLE, c_void_p, _HANDLE),
    "cuGraphInstantiateWithFlags": (_OUT, _HANDLE, c_uint64),
    "cuGraphDestroy": (_HANDLE,),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuLaunchKernelEx": (c_void_p, _HANDLE, c_void_p, c_void_p),
}
CONDITIONS: dict[str, tuple[Any, ...]] = {  # which older drivers lack
    "cuGraphConditionalHandleCreate": (POINTER(c_uint64), _HANDLE, _HANDLE, c_uint, c_uint),
    "cuGraphAddNode_v2": (_OUT, _HANDLE, c_void_p, c_void_p, c_size_t, c_void_p),
}
