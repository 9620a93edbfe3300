// Empty tensors for the call path of GPU kernels, made in C++: what torch.empty_strided does once its arguments are
// read. Built against the headers of the PyTorch that is installed; without it outputs are allocated through Python.
//
//   prepare(device_type, outputs) -> capsule: outputs are a tuple of (shape, strides, dtype)
//   entry() -> address of fuseplan_allocate
#define PY_SSIZE_T_CLEAN
#include <ATen/EmptyTensor.h>
#include <Python.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/Dtype.h>

#include <vector>

PyObject* THPVariable_Wrap(at::TensorBase&& tensor);

static const char* const NAME = "fuseplan_tensor_allocator.outputs";

struct Output {
  std::vector<int64_t> shape, strides;
  c10::ScalarType dtype;
};

struct Outputs {
  c10::DeviceType device;
  c10::DispatchKeySet keys;
  std::vector<Output> each;
};

// Makes output `position` on the current device; `false`, without a Python error, where that fails: the caller then
// allocates through Python, which says why.
extern "C" bool fuseplan_allocate(const void* prepared, int position, PyObject** made, char** address) {
  const Outputs* outputs = (const Outputs*)prepared;
  const Output& one = outputs->each[position];
  try {
    // Asked anew each time: programs may exchange the allocator.
    c10::Allocator* allocator = c10::GetAllocator(outputs->device);
    at::TensorBase tensor =
        at::detail::empty_strided_generic(one.shape, one.strides, allocator, outputs->keys, one.dtype);
    *address = (char*)tensor.unsafeGetTensorImpl()->mutable_data();
    *made = THPVariable_Wrap(std::move(tensor));
  } catch (...) {
    *made = NULL;
  }
  if (!*made) PyErr_Clear();
  return *made != NULL;
}

static bool read_numbers(PyObject* tuple, std::vector<int64_t>* numbers) {
  if (!PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "shape and strides must be tuples");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    numbers->push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
    if (numbers->back() == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

static bool read_output(PyObject* layout, Output* output) {
  PyObject *shape, *strides, *dtype;
  if (!PyArg_ParseTuple(layout, "OOO!", &shape, &strides, &THPDtypeType, &dtype)) return false;
  output->dtype = ((THPDtype*)dtype)->scalar_type;
  return read_numbers(shape, &output->shape) && read_numbers(strides, &output->strides);
}

static void release(PyObject* capsule) { delete (Outputs*)PyCapsule_GetPointer(capsule, NAME); }

static PyObject* prepare(PyObject*, PyObject* args) {
  const char* device;
  PyObject* layouts;
  if (!PyArg_ParseTuple(args, "sO!", &device, &PyTuple_Type, &layouts)) return NULL;
  const bool cuda = !strcmp(device, "cuda");
  if (!cuda && strcmp(device, "cpu")) return PyErr_Format(PyExc_ValueError, "no allocator for '%s'", device);
  Outputs* outputs = new Outputs;
  outputs->device = cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  outputs->keys = c10::DispatchKeySet(cuda ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  outputs->each.resize(PyTuple_GET_SIZE(layouts));
  bool done = true;
  for (Py_ssize_t i = 0; done && i < PyTuple_GET_SIZE(layouts); ++i)
    done = read_output(PyTuple_GET_ITEM(layouts, i), &outputs->each[i]);
  PyObject* capsule = done ? PyCapsule_New(outputs, NAME, release) : NULL;
  if (!capsule) delete outputs;
  return capsule;
}

static PyObject* entry(PyObject*, PyObject*) { return PyLong_FromVoidPtr((void*)&fuseplan_allocate); }

static PyMethodDef functions[] = {
    {"prepare", prepare, METH_VARARGS, "prepare(device_type, outputs) -> capsule"},
    {"entry", entry, METH_NOARGS, "entry() -> address of fuseplan_allocate"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuseplan_tensor_allocator", NULL, -1, functions};

PyMODINIT_FUNC PyInit_fuseplan_tensor_allocator(void) { return PyModule_Create(&module); }
