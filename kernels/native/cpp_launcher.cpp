// The call path of CPU kernels: a CPython extension, compiled once per interpreter, that turns a Python call into a
// kernel call in well under a microsecond. A Kernel object holds a compiled kernel's entry points and how to run it.
//
//   kernel.run(*tensors, *sizes)   -> None: every buffer preallocated, inputs first
//   kernel.fused(*inputs, *sizes)  -> tensor or tuple: outputs allocated here
//
// Behind its buffers a kernel is given a number, which it sets where an index is outside its table: both calls then
// raise `outside`.
#include "launcher.h"

struct Launch {  // as in cpp_loops.h
  i64 threads, grain, rows_per_task, col_tile;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread_num)();
  int (*num_threads)();
  int (*max_threads)();
};

struct Kernel {
  PyObject_HEAD
  void (*launch)(void* const*, const i64*, const Launch*);
  void (*shapes)(const i64*, i64*);
  DataPtr data_ptr;
  Launch how;
  int inputs, symbols, release;  // release: give up the GIL while the kernel runs
  PyObject* allocate;            // (shape, strides, dtype) -> tensor
  PyObject* outputs;             // tuple of (ndim, dtype, position of the input that it is or -1)
  PyObject* fixed;               // tuple of (shape, strides, dtype) when there are no symbols, else null
  PyObject* outside;             // exception type
  PyObject* library;             // what keeps the code of `launch` and `shapes` loaded
};

// False, with an exception set, where an index is outside its table. `buffers` has room for one more address.
static bool launch(const Kernel* self, char** buffers, int count, const i64* sizes) {
  int outside = 0;
  buffers[count] = (char*)&outside;
  if (!self->release) {
    self->launch((void* const*)buffers, sizes, &self->how);
  } else {
    Py_BEGIN_ALLOW_THREADS
    self->launch((void* const*)buffers, sizes, &self->how);
    Py_END_ALLOW_THREADS
  }
  if (outside) PyErr_SetString(self->outside, "an index is outside its table");
  return !outside;
}

static PyObject* kernel_run(PyObject* object, PyObject* const* args, Py_ssize_t given) {
  Kernel* self = (Kernel*)object;
  char* buffers[MAX_ARGUMENTS + 1];
  i64 sizes[MAX_ARGUMENTS];
  const int tensors = self->inputs + (int)PyTuple_GET_SIZE(self->outputs);
  if (!read_arguments(self->data_ptr, args, given, tensors, self->symbols, buffers, sizes)) return NULL;
  if (!launch(self, buffers, tensors, sizes)) return NULL;
  Py_RETURN_NONE;
}

static PyObject* size_tuple(const i64* values, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple && i < count; ++i) {
    PyObject* number = PyLong_FromLongLong(values[i]);
    if (!number) Py_CLEAR(tuple);
    else PyTuple_SET_ITEM(tuple, i, number);
  }
  return tuple;
}

// Allocates output `position`; `shapes` are the sizes and strides of this output where they are dynamic.
static PyObject* allocate(const Kernel* self, Py_ssize_t position, const i64* shapes) {
  if (self->fixed) return PyObject_Call(self->allocate, PyTuple_GET_ITEM(self->fixed, position), NULL);
  PyObject* spec = PyTuple_GET_ITEM(self->outputs, position);
  const Py_ssize_t ndim = PyLong_AsSsize_t(PyTuple_GET_ITEM(spec, 0));
  PyObject* arguments[3] = {size_tuple(shapes, ndim), size_tuple(shapes + ndim, ndim), PyTuple_GET_ITEM(spec, 1)};
  PyObject* tensor = NULL;
  if (arguments[0] && arguments[1]) tensor = PyObject_Vectorcall(self->allocate, arguments, 3, NULL);
  Py_XDECREF(arguments[0]);
  Py_XDECREF(arguments[1]);
  return tensor;
}

static PyObject* kernel_fused(PyObject* object, PyObject* const* args, Py_ssize_t given) {
  Kernel* self = (Kernel*)object;
  char* buffers[MAX_ARGUMENTS + 1];
  i64 sizes[MAX_ARGUMENTS], shapes[4 * MAX_ARGUMENTS];
  const int count = (int)PyTuple_GET_SIZE(self->outputs);
  if (!read_arguments(self->data_ptr, args, given, self->inputs, self->symbols, buffers, sizes)) return NULL;
  if (!self->fixed) self->shapes(sizes, shapes);

  PyObject* made[MAX_ARGUMENTS];
  int ready = 0;
  const i64* shape = shapes;
  for (; ready < count; ++ready) {
    const long over = PyLong_AsLong(PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->outputs, ready), 2));
    made[ready] = over < 0 ? allocate(self, ready, shape) : Py_NewRef(args[over]);
    if (!made[ready]) break;
    shape += 2 * PyLong_AsSsize_t(PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->outputs, ready), 0));
    if (!address_of(self->data_ptr, made[ready], &buffers[self->inputs + ready])) {
      ++ready;
      break;
    }
  }
  if (PyErr_Occurred() || !launch(self, buffers, self->inputs + count, sizes)) {
    drop(made, ready);
    return NULL;
  }
  return result_of(made, count);
}

static void kernel_dealloc(PyObject* object) {
  Kernel* self = (Kernel*)object;
  Py_XDECREF(self->allocate);
  Py_XDECREF(self->outputs);
  Py_XDECREF(self->fixed);
  Py_XDECREF(self->outside);
  Py_XDECREF(self->library);
  Py_TYPE(object)->tp_free(object);
}

// Kernel(addresses, counts, how, allocate, outputs, fixed, outside, library): see cpp/launch.py.
static int kernel_init(PyObject* object, PyObject* args, PyObject*) {
  Kernel* self = (Kernel*)object;
  unsigned long long launch, shapes, data_ptr, parallel, thread_num, num_threads, max_threads;
  PyObject *allocate, *outputs, *fixed, *outside, *library;
  if (!PyArg_ParseTuple(args, "(KKKKKKK)(iip)(LLLL)OO!OOO", &launch, &shapes, &data_ptr, &parallel, &thread_num,
                        &num_threads, &max_threads, &self->inputs, &self->symbols, &self->release, &self->how.threads,
                        &self->how.grain, &self->how.rows_per_task, &self->how.col_tile, &allocate, &PyTuple_Type,
                        &outputs, &fixed, &outside, &library))
    return -1;
  if (self->inputs + self->symbols + PyTuple_GET_SIZE(outputs) > MAX_ARGUMENTS) {
    PyErr_SetString(PyExc_ValueError, "too many kernel arguments");
    return -1;
  }
  self->launch = (void (*)(void* const*, const i64*, const Launch*))launch;
  self->shapes = (void (*)(const i64*, i64*))shapes;
  self->data_ptr = (DataPtr)data_ptr;
  self->how.parallel = (void (*)(void (*)(void*), void*, unsigned, unsigned))parallel;
  self->how.thread_num = (int (*)())thread_num;
  self->how.num_threads = (int (*)())num_threads;
  self->how.max_threads = (int (*)())max_threads;
  self->allocate = Py_NewRef(allocate);
  self->outputs = Py_NewRef(outputs);
  self->fixed = fixed == Py_None ? NULL : Py_NewRef(fixed);
  self->outside = Py_NewRef(outside);
  self->library = Py_NewRef(library);
  return 0;
}

static PyMethodDef kernel_methods[] = {
    {"run", (PyCFunction)(void (*)(void))kernel_run, METH_FASTCALL, "run(*tensors, *sizes) -> None"},
    {"fused", (PyCFunction)(void (*)(void))kernel_fused, METH_FASTCALL, "fused(*inputs, *sizes) -> tensor or tuple"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject kernel_type = {PyVarObject_HEAD_INIT(NULL, 0)};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuseplan_cpp_launcher", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_fuseplan_cpp_launcher(void) {
  kernel_type.tp_name = "fuseplan_cpp_launcher.Kernel";
  kernel_type.tp_basicsize = sizeof(Kernel);
  kernel_type.tp_flags = Py_TPFLAGS_DEFAULT;
  kernel_type.tp_new = PyType_GenericNew;
  kernel_type.tp_init = kernel_init;
  kernel_type.tp_dealloc = kernel_dealloc;
  kernel_type.tp_methods = kernel_methods;
  if (PyType_Ready(&kernel_type) < 0) return NULL;
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  PyObject* result = data_ptr_name ? PyModule_Create(&module) : NULL;
  if (result && PyModule_AddObjectRef(result, "Kernel", (PyObject*)&kernel_type) < 0) Py_CLEAR(result);
  return result;
}
