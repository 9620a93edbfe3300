// What the two call paths (cpp_launcher.cpp, gpu_launcher.cpp) share: reading a Python call, and its result.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef long long i64;
typedef void* (*DataPtr)(PyObject*);  // address of a tensor; null: call its method

enum { MAX_ARGUMENTS = 256 };
static PyObject* data_ptr_name;  // of the method; set when the module is made

static bool address_of(DataPtr data_ptr, PyObject* tensor, char** address) {
  if (data_ptr) {
    try {
      *address = (char*)data_ptr(tensor);
      return true;
    } catch (...) {
      PyErr_Format(PyExc_TypeError, "expected a tensor, got %s", Py_TYPE(tensor)->tp_name);
      return false;
    }
  }
  PyObject* number = PyObject_CallMethodNoArgs(tensor, data_ptr_name);
  if (!number) return false;
  *address = (char*)PyLong_AsVoidPtr(number);
  Py_DECREF(number);
  return !PyErr_Occurred();
}

// The addresses of the first `tensors` arguments, and the numbers that follow them.
static bool read_arguments(DataPtr data_ptr, PyObject* const* args, Py_ssize_t given, int tensors, int symbols,
                           char** buffers, i64* sizes) {
  if (given != tensors + symbols) {
    PyErr_Format(PyExc_TypeError, "the kernel takes %d tensors and %d sizes, got %zd arguments", tensors, symbols,
                 given);
    return false;
  }
  for (int i = 0; i < tensors; ++i)
    if (!address_of(data_ptr, args[i], &buffers[i])) return false;
  for (int i = 0; i < symbols; ++i) {
    sizes[i] = PyLong_AsLongLong(args[tensors + i]);
    if (sizes[i] == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

static void drop(PyObject** made, int count) {
  while (count > 0) Py_DECREF(made[--count]);
}

// One tensor itself, several as a tuple; they are the result's from now on.
static PyObject* result_of(PyObject** made, int count) {
  if (count == 1) return made[0];
  PyObject* result = PyTuple_New(count);
  if (!result) drop(made, count);
  for (int i = 0; result && i < count; ++i) PyTuple_SET_ITEM(result, i, made[i]);
  return result;
}
