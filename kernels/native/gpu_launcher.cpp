// The call path of GPU kernels: a CPython extension, compiled once per interpreter, that turns a Python call into one
// cuLaunchKernel (or cuLaunchKernelEx, for kernels that may start before the one in front of them has ended). It knows
// nothing of CUDA's or PyTorch's headers: their functions come as addresses.
//
//   kernel.run(*tensors, *sizes)   -> None: every buffer preallocated, inputs first
//   kernel.fused(*inputs, *sizes)  -> tensor or tuple: outputs allocated here, but for those that take an input's place
//   kernel.add_grid(sizes, programs, wide, outputs or None)
//   kernel.add_binary(device, wide, aligned, function, threads, shared_bytes, overlapped): for the current context
//     Both say whether that was new, and is known now.
//   addresses(data_ptr, args, positions, others) -> bytes: where the tensors args[positions] and others lie
//
// A call whose sizes, context or alignment were never added goes to the Python callables `slow_run(kernel, *args)` or
// `slow_fused(kernel, *args)`, which do the call and add what was missing.
#include <cstddef>
#include <cstring>

#include "launcher.h"

typedef unsigned long long u64;

// CUlaunchAttribute and CUlaunchConfig of cuda.h.
struct LaunchAttribute {
  unsigned id, padding;
  union {
    int number;
    char bytes[64];
  } value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8, "CUlaunchAttribute");
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32 &&
                  offsetof(LaunchConfig, attributes) == 40 && offsetof(LaunchConfig, num_attributes) == 48,
              "CUlaunchConfig");
enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };  // of CUlaunchAttributeID

struct Driver {
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra);
  int (*current_context)(void** context);
  int (*error_text)(int error, const char** text);
  int (*launch_config)(const LaunchConfig* config, void* function, void** parameters, void** extra);
};

struct Grid {
  unsigned programs;
  int wide;  // index arithmetic in 64 bits
  PyObject* outputs;  // tuple of (shape, strides, dtype) of what is allocated, null until `fused` needed it
};

struct Binary {
  void* context;
  int wide, aligned;
  void* function;
  unsigned threads, shared;
  int overlapped;  // the kernel itself waits for the one in front of it
  int device;
  PyObject* device_number;
};

struct Argument {
  int buffer;
  i64 offset;  // bytes
};

enum { MAX_GRIDS = 64, MAX_BINARIES = 64, TRAILING = 2 };

struct Kernel {
  PyObject_HEAD
  Driver driver;
  DataPtr data_ptr;
  int inputs, outputs, symbols, check_device;
  Argument arguments[MAX_ARGUMENTS];
  int num_arguments;
  int place[MAX_ARGUMENTS];  // of each output: the input that it overwrites and is, or -1
  int allocated;             // outputs that are not
  Grid grids[MAX_GRIDS];
  i64* grid_sizes;  // [MAX_GRIDS, symbols]
  int num_grids, last_grid, oldest_grid;
  Binary binaries[MAX_BINARIES];
  int num_binaries;
  PyObject *allocate, *stream, *slow_run, *slow_fused;
};

static PyObject* get_device_name;

// -- reading a call ----------------------------------------------------------------------------------------------

static const Grid* find_grid(Kernel* self, const i64* sizes) {
  const size_t bytes = sizeof(i64) * self->symbols;
  if (self->num_grids && !memcmp(self->grid_sizes + self->last_grid * self->symbols, sizes, bytes))
    return &self->grids[self->last_grid];
  for (int i = 0; i < self->num_grids; ++i)
    if (!memcmp(self->grid_sizes + i * self->symbols, sizes, bytes)) return &self->grids[self->last_grid = i];
  return NULL;
}

static const Binary* find_binary(const Kernel* self, void* context, bool wide, bool aligned) {
  for (int i = 0; i < self->num_binaries; ++i) {
    const Binary* one = &self->binaries[i];
    if (one->context == context && one->wide == wide && one->aligned == aligned) return one;
  }
  return NULL;
}

// The context to launch in, or null where this call needs the slow path: nothing was loaded for the current device, or
// the tensors are on another one. `failed` is set on an error.
static void* usable_context(const Kernel* self, PyObject* tensor, bool* failed) {
  void* context = NULL;
  if (self->driver.current_context(&context) || !context) return NULL;
  const Binary* known = self->binaries;
  const Binary* const end = known + self->num_binaries;
  while (known < end && known->context != context) ++known;
  if (known == end) return NULL;
  if (!self->check_device || !tensor) return context;
  PyObject* number = PyObject_CallMethodNoArgs(tensor, get_device_name);
  if (!number) {
    *failed = true;
    return NULL;
  }
  const long theirs = PyLong_AsLong(number);
  Py_DECREF(number);
  return theirs == known->device ? context : NULL;
}

static PyObject* call_slowly(PyObject* object, PyObject* function, PyObject* const* args, Py_ssize_t given) {
  PyObject* all[MAX_ARGUMENTS + 1];
  all[0] = object;
  memcpy(all + 1, args, sizeof(PyObject*) * given);
  return PyObject_Vectorcall(function, all, given + 1, NULL);
}

// -- launching ---------------------------------------------------------------------------------------------------

// Lets the kernel start when the programs in front of it in the stream have all said so or ended. In a stream that is
// being captured this makes a programmatic edge; behind anything but a kernel, a full one.
static int launch_overlapped(const Driver* driver, const Binary* binary, unsigned programs, void* stream,
                             void** parameters) {
  LaunchAttribute attribute = {PROGRAMMATIC_STREAM_SERIALIZATION, 0, {1}};
  const LaunchConfig config = {programs, 1, 1, binary->threads, 1, 1, binary->shared, stream, &attribute, 1};
  return driver->launch_config(&config, binary->function, parameters, NULL);
}

static bool current_stream(const Kernel* self, const Binary* binary, void** stream) {
  PyObject* number = PyObject_CallOneArg(self->stream, binary->device_number);
  if (!number) return false;
  *stream = PyLong_AsVoidPtr(number);
  Py_DECREF(number);
  return *stream || !PyErr_Occurred();
}

static bool launch(const Kernel* self, const Binary* binary, unsigned programs, char* const* buffers, i64* sizes) {
  void* stream = NULL;
  if (!current_stream(self, binary, &stream)) return false;

  // Sizes of 32 bits are read from the low half of their 64: every host that CUDA runs on is little-endian. Triton
  // appends addresses of scratch memory, null where a kernel uses none; the driver reads as many as the kernel has.
  char *addresses[MAX_ARGUMENTS], *scratch = NULL;
  void* parameters[2 * MAX_ARGUMENTS + TRAILING];
  int count = 0;
  for (; count < self->num_arguments; ++count) {
    addresses[count] = buffers[self->arguments[count].buffer] + self->arguments[count].offset;
    parameters[count] = &addresses[count];
  }
  for (int i = 0; i < self->symbols; ++i) parameters[count++] = &sizes[i];
  for (int i = 0; i < TRAILING; ++i) parameters[count++] = &scratch;

  const Driver driver = self->driver;
  const Binary one = *binary;
  int error;
  Py_BEGIN_ALLOW_THREADS  // a full queue makes the driver wait
  if (one.overlapped) error = launch_overlapped(&driver, &one, programs, stream, parameters);
  else error = driver.launch(one.function, programs, 1, 1, one.threads, 1, 1, one.shared, stream, parameters, NULL);
  Py_END_ALLOW_THREADS
  if (!error) return true;
  const char* text = NULL;
  if (driver.error_text) driver.error_text(error, &text);
  PyErr_Format(PyExc_RuntimeError, "CUDA error %d (%s) when launching %u programs of %u threads", error,
               text ? text : "unknown", programs, one.threads);
  return false;
}

static bool is_aligned(char* const* buffers, int count) {
  u64 bits = 0;
  for (int i = 0; i < count; ++i) bits |= (u64)buffers[i];
  return bits % 16 == 0;
}

static PyObject* kernel_run(PyObject* object, PyObject* const* args, Py_ssize_t given) {
  Kernel* self = (Kernel*)object;
  char* buffers[MAX_ARGUMENTS];
  i64 sizes[MAX_ARGUMENTS];
  const int tensors = self->inputs + self->outputs;
  if (!read_arguments(self->data_ptr, args, given, tensors, self->symbols, buffers, sizes)) return NULL;
  const Grid* grid = find_grid(self, sizes);
  if (grid && !grid->programs) Py_RETURN_NONE;
  bool failed = false;
  void* context = grid ? usable_context(self, tensors ? args[0] : NULL, &failed) : NULL;
  if (failed) return NULL;
  const Binary* binary = context ? find_binary(self, context, grid->wide, is_aligned(buffers, tensors)) : NULL;
  if (!binary) return call_slowly(object, self->slow_run, args, given);
  if (!launch(self, binary, grid->programs, buffers, sizes)) return NULL;
  Py_RETURN_NONE;
}

static bool allocate_output(const Kernel* self, const Grid* grid, int position, PyObject** made, char** address) {
  *made = PyObject_Call(self->allocate, PyTuple_GET_ITEM(grid->outputs, position), NULL);
  if (*made && address_of(self->data_ptr, *made, address)) return true;
  Py_CLEAR(*made);
  return false;
}

// Finds or allocates every output; on failure nothing is left to release.
static bool make_outputs(const Kernel* self, const Grid* grid, PyObject* const* args, PyObject** made, char** buffers) {
  int allocated = 0;
  for (int i = 0; i < self->outputs; ++i) {
    const int place = self->place[i];
    if (place >= 0) {
      made[i] = Py_NewRef(args[place]);
      buffers[self->inputs + i] = buffers[place];
    } else if (!allocate_output(self, grid, allocated++, &made[i], &buffers[self->inputs + i])) {
      drop(made, i);
      return false;
    }
  }
  return true;
}

static PyObject* kernel_fused(PyObject* object, PyObject* const* args, Py_ssize_t given) {
  Kernel* self = (Kernel*)object;
  char* buffers[MAX_ARGUMENTS];
  i64 sizes[MAX_ARGUMENTS];
  if (!read_arguments(self->data_ptr, args, given, self->inputs, self->symbols, buffers, sizes)) return NULL;
  const Grid* found = find_grid(self, sizes);
  bool failed = false;
  void* context = found && found->outputs ? usable_context(self, self->inputs ? args[0] : NULL, &failed) : NULL;
  if (failed) return NULL;
  if (!context) return call_slowly(object, self->slow_fused, args, given);

  PyObject* made[MAX_ARGUMENTS];
  const Grid grid = *found;  // allocating may let another thread replace it
  Py_INCREF(grid.outputs);
  const bool allocated = make_outputs(self, &grid, args, made, buffers);
  Py_DECREF(grid.outputs);
  if (!allocated) return NULL;

  const int tensors = self->inputs + self->outputs;
  const Binary* binary = find_binary(self, context, grid.wide, is_aligned(buffers, tensors));
  bool done = !grid.programs;
  if (!done && binary) {
    done = launch(self, binary, grid.programs, buffers, sizes);
  } else if (!done) {
    PyObject* all[MAX_ARGUMENTS];
    memcpy(all, args, sizeof(PyObject*) * self->inputs);
    memcpy(all + self->inputs, made, sizeof(PyObject*) * self->outputs);
    memcpy(all + tensors, args + self->inputs, sizeof(PyObject*) * self->symbols);
    PyObject* nothing = call_slowly(object, self->slow_run, all, tensors + self->symbols);
    done = nothing != NULL;
    Py_XDECREF(nothing);
  }
  if (done) return result_of(made, self->outputs);
  drop(made, self->outputs);
  return NULL;
}

// -- learning ----------------------------------------------------------------------------------------------------

static PyObject* kernel_add_grid(PyObject* object, PyObject* args) {
  Kernel* self = (Kernel*)object;
  PyObject *given, *outputs;
  unsigned programs;
  int wide;
  if (!PyArg_ParseTuple(args, "O!IpO", &PyTuple_Type, &given, &programs, &wide, &outputs)) return NULL;
  if (PyTuple_GET_SIZE(given) != self->symbols ||
      (outputs != Py_None && (!PyTuple_Check(outputs) || PyTuple_GET_SIZE(outputs) != self->allocated))) {
    PyErr_SetString(PyExc_ValueError, "sizes or outputs do not match the kernel");
    return NULL;
  }
  i64 sizes[MAX_ARGUMENTS];
  for (int i = 0; i < self->symbols; ++i) {
    sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(given, i));
    if (sizes[i] == -1 && PyErr_Occurred()) return NULL;
  }
  Grid* grid = (Grid*)find_grid(self, sizes);
  const bool is_new = !grid;
  if (is_new) {
    int place = self->num_grids;
    if (place < MAX_GRIDS) {
      ++self->num_grids;
    } else {
      place = self->oldest_grid;
      self->oldest_grid = (place + 1) % MAX_GRIDS;
    }
    memcpy(self->grid_sizes + place * self->symbols, sizes, sizeof(i64) * self->symbols);
    grid = &self->grids[self->last_grid = place];
    Py_CLEAR(grid->outputs);
  }
  grid->programs = programs;
  grid->wide = wide;
  if (outputs != Py_None) Py_XSETREF(grid->outputs, Py_NewRef(outputs));
  return PyBool_FromLong(is_new);
}

static PyObject* kernel_add_binary(PyObject* object, PyObject* args) {
  Kernel* self = (Kernel*)object;
  Binary one = {};
  u64 function;
  if (!PyArg_ParseTuple(args, "ippKIIp", &one.device, &one.wide, &one.aligned, &function, &one.threads, &one.shared,
                        &one.overlapped))
    return NULL;
  one.function = (void*)function;
  if (self->driver.current_context(&one.context) || !one.context) {
    PyErr_SetString(PyExc_RuntimeError, "no CUDA context is current");
    return NULL;
  }
  // A full table (more than 16 devices) leaves the rest to the slow path.
  if (self->num_binaries == MAX_BINARIES || find_binary(self, one.context, one.wide, one.aligned)) Py_RETURN_FALSE;
  one.device_number = PyLong_FromLong(one.device);
  if (!one.device_number) return NULL;
  self->binaries[self->num_binaries++] = one;
  Py_RETURN_TRUE;
}

// -- where tensors lie ------------------------------------------------------------------------------------------

static PyObject* addresses(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4 || !PyTuple_Check(given[1]) || !PyTuple_Check(given[2]) || !PyTuple_Check(given[3])) {
    PyErr_SetString(PyExc_TypeError, "addresses(data_ptr, args, positions, others) takes a number and three tuples");
    return NULL;
  }
  DataPtr const data_ptr = (DataPtr)PyLong_AsUnsignedLongLong(given[0]);
  if (PyErr_Occurred()) return NULL;
  PyObject *args = given[1], *positions = given[2], *others = given[3];
  const Py_ssize_t chosen = PyTuple_GET_SIZE(positions), more = PyTuple_GET_SIZE(others);
  PyObject* result = PyBytes_FromStringAndSize(NULL, (chosen + more) * sizeof(char*));
  if (!result) return NULL;
  char** found = (char**)PyBytes_AS_STRING(result);
  bool done = true;
  for (Py_ssize_t i = 0; done && i < chosen; ++i) {
    PyObject* tensor = PyTuple_GetItem(args, PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, i)));
    done = tensor && address_of(data_ptr, tensor, found++);
  }
  for (Py_ssize_t i = 0; done && i < more; ++i)
    done = address_of(data_ptr, PyTuple_GET_ITEM(others, i), found++);
  if (!done) Py_CLEAR(result);
  return result;
}

static PyMethodDef functions[] = {
    {"addresses", (PyCFunction)(void (*)(void))addresses, METH_FASTCALL,
     "addresses(data_ptr, args, positions, others) -> bytes"},
    {NULL, NULL, 0, NULL},
};

// -- the type ----------------------------------------------------------------------------------------------------

static void kernel_dealloc(PyObject* object) {
  Kernel* self = (Kernel*)object;
  for (int i = 0; i < self->num_grids; ++i) Py_XDECREF(self->grids[i].outputs);
  for (int i = 0; i < self->num_binaries; ++i) Py_XDECREF(self->binaries[i].device_number);
  PyMem_Free(self->grid_sizes);
  Py_XDECREF(self->allocate);
  Py_XDECREF(self->stream);
  Py_XDECREF(self->slow_run);
  Py_XDECREF(self->slow_fused);
  Py_TYPE(object)->tp_free(object);
}

static bool read_parameters(Kernel* self, PyObject* arguments) {
  self->num_arguments = (int)PyTuple_GET_SIZE(arguments);
  for (int i = 0; i < self->num_arguments; ++i) {
    Argument* one = &self->arguments[i];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(arguments, i), "iL", &one->buffer, &one->offset)) return false;
    if (one->buffer < 0 || one->buffer >= self->inputs + self->outputs) {
      PyErr_SetString(PyExc_ValueError, "an argument names a buffer that the kernel does not have");
      return false;
    }
  }
  return true;
}

static bool read_places(Kernel* self, PyObject* places) {
  for (int i = 0; i < self->outputs; ++i) {
    const long place = PyLong_AsLong(PyTuple_GET_ITEM(places, i));
    if (place == -1 && PyErr_Occurred()) return false;
    if (place < -1 || place >= self->inputs) {
      PyErr_SetString(PyExc_ValueError, "an output takes the place of an input that the kernel does not have");
      return false;
    }
    self->place[i] = (int)place;
    self->allocated += place < 0;
  }
  return true;
}

// Kernel(driver, data_ptr, counts, arguments, places, (allocate, stream, slow_run, slow_fused)); the caller is
// gpu/direct.py.
static int kernel_init(PyObject* object, PyObject* args, PyObject*) {
  Kernel* self = (Kernel*)object;
  u64 launch, current_context, error_text, launch_config, data_ptr;
  PyObject *arguments, *places, *allocate, *stream, *slow_run, *slow_fused;
  if (!PyArg_ParseTuple(args, "(KKKK)K(iiip)O!O!(OOOO)", &launch, &current_context, &error_text, &launch_config,
                        &data_ptr, &self->inputs, &self->outputs, &self->symbols, &self->check_device, &PyTuple_Type,
                        &arguments, &PyTuple_Type, &places, &allocate, &stream, &slow_run, &slow_fused))
    return -1;
  if (self->inputs + self->outputs + self->symbols > MAX_ARGUMENTS || PyTuple_GET_SIZE(arguments) > MAX_ARGUMENTS) {
    PyErr_SetString(PyExc_ValueError, "too many kernel arguments");
    return -1;
  }
  if (PyTuple_GET_SIZE(places) != self->outputs) {
    PyErr_SetString(PyExc_ValueError, "every output needs a place");
    return -1;
  }
  if (!read_parameters(self, arguments) || !read_places(self, places)) return -1;
  self->grid_sizes = (i64*)PyMem_Calloc(MAX_GRIDS * (self->symbols + 1), sizeof(i64));
  if (!self->grid_sizes) {
    PyErr_NoMemory();
    return -1;
  }
  self->driver.launch = (decltype(Driver::launch))launch;
  self->driver.current_context = (decltype(Driver::current_context))current_context;
  self->driver.error_text = (decltype(Driver::error_text))error_text;
  self->driver.launch_config = (decltype(Driver::launch_config))launch_config;
  self->data_ptr = (DataPtr)data_ptr;
  self->allocate = Py_NewRef(allocate);
  self->stream = Py_NewRef(stream);
  self->slow_run = Py_NewRef(slow_run);
  self->slow_fused = Py_NewRef(slow_fused);
  return 0;
}

static PyMethodDef kernel_methods[] = {
    {"run", (PyCFunction)(void (*)(void))kernel_run, METH_FASTCALL, "run(*tensors, *sizes) -> None"},
    {"fused", (PyCFunction)(void (*)(void))kernel_fused, METH_FASTCALL, "fused(*inputs, *sizes) -> tensor or tuple"},
    {"add_grid", kernel_add_grid, METH_VARARGS, "add_grid(sizes, programs, wide, outputs) -> None"},
    {"add_binary", kernel_add_binary, METH_VARARGS,
     "add_binary(device, wide, aligned, function, threads, shared_bytes, overlapped) -> bool"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject kernel_type = {PyVarObject_HEAD_INIT(NULL, 0)};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuseplan_gpu_launcher", NULL, -1, functions};

PyMODINIT_FUNC PyInit_fuseplan_gpu_launcher(void) {
  kernel_type.tp_name = "fuseplan_gpu_launcher.Kernel";
  kernel_type.tp_basicsize = sizeof(Kernel);
  kernel_type.tp_flags = Py_TPFLAGS_DEFAULT;
  kernel_type.tp_new = PyType_GenericNew;
  kernel_type.tp_init = kernel_init;
  kernel_type.tp_dealloc = kernel_dealloc;
  kernel_type.tp_methods = kernel_methods;
  if (PyType_Ready(&kernel_type) < 0) return NULL;
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  get_device_name = PyUnicode_InternFromString("get_device");
  PyObject* result = data_ptr_name && get_device_name ? PyModule_Create(&module) : NULL;
  if (result && PyModule_AddObjectRef(result, "Kernel", (PyObject*)&kernel_type) < 0) Py_CLEAR(result);
  return result;
}
