// A call in front of a compiled graph that writes to its arguments: the graph as it was where memory that is written
// meets memory of another argument, the compiled one where it does not. What has not moved since the last call is not
// looked up again, so most calls only read addresses.
//
//   guard.call(*args) -> what compiled(*args) or unfused(*args) gives
#include "launcher.h"

struct Operand {  // a tensor among the arguments, and where it lay in the last call
  Py_ssize_t position;
  i64 itemsize, fixed;  // fixed: bytes from the first to the last element; -1 where sizes are dynamic
  char *begin, *end;    // equal for a tensor without elements
  bool meets;
};

struct Guard {
  PyObject_HEAD;
  PyObject *compiled, *unfused, *met;
  DataPtr data_ptr;
  Py_ssize_t written, count;  // of the operands, those that are written come first
  Operand* operands;
  Operand** sorted;  // those with memory that are written, by address
  Py_ssize_t spans;
  bool written_meet;
  bool known;  // all of this is of one call
};

static PyObject *shape_name, *stride_name;  // set when the module is made

// Bytes from the first to the last element of a tensor, -1 with an error.
static i64 bytes_of(PyObject* tensor, i64 itemsize) {
  PyObject* shape = PyObject_GetAttr(tensor, shape_name);
  PyObject* strides = shape ? PyObject_CallMethodNoArgs(tensor, stride_name) : NULL;
  i64 last = 0;
  for (Py_ssize_t i = 0; strides && i < PyTuple_GET_SIZE(shape); ++i) {
    const i64 extent = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
    if (!extent) last = -1;
    if (last < 0) break;
    last += (extent - 1) * PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
  }
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  return PyErr_Occurred() ? -1 : (last + 1) * itemsize;
}

// Where an operand lies in this call; *moved when that is elsewhere than in the last one.
static bool read_operand(const Guard* self, Operand* one, PyObject* const* args, bool* moved) {
  char* begin;
  if (!address_of(self->data_ptr, args[one->position], &begin)) return false;
  i64 bytes = one->fixed;
  if (bytes < 0 && (bytes = bytes_of(args[one->position], one->itemsize)) < 0) return false;
  char* end = begin ? begin + bytes : begin;
  *moved = begin != one->begin || end != one->end;
  one->begin = begin;
  one->end = end;
  return true;
}

static int by_address(const void* one, const void* other) {
  const Operand *a = *(Operand* const*)one, *b = *(Operand* const*)other;
  return a->begin < b->begin ? -1 : a->begin > b->begin;
}

// Sorts what is written, and finds out whether any of it meets other memory that is written.
static void sort_written(Guard* self) {
  self->spans = 0;
  for (Operand* one = self->operands; one < self->operands + self->written; ++one)
    if (one->begin < one->end) self->sorted[self->spans++] = one;
  qsort(self->sorted, self->spans, sizeof(Operand*), by_address);
  self->written_meet = false;
  for (Py_ssize_t i = 1; i < self->spans; ++i)
    if (self->sorted[i]->begin < self->sorted[i - 1]->end) self->written_meet = true;
}

// Whether an operand meets memory that is written, none of which meets another.
static bool meets_written(const Guard* self, const Operand* one) {
  Py_ssize_t low = 0, high = self->spans;  // the first that begins after the operand
  while (low < high) {
    const Py_ssize_t middle = (low + high) / 2;
    if (self->sorted[middle]->begin < one->end) low = middle + 1;
    else high = middle;
  }
  return one->begin < one->end && low && self->sorted[low - 1]->end > one->begin;
}

// 1: memory that is written meets other memory, 0: it does not, -1: error.
static int find_meeting(Guard* self, PyObject* const* args, Py_ssize_t given) {
  bool moved, rewritten = !self->known, meets = false;
  Operand *one = self->operands, *const reads = one + self->written, *const end = one + self->count;
  self->known = false;
  for (; one < reads; ++one) {
    if (one->position >= given || !read_operand(self, one, args, &moved)) return -1;
    rewritten |= moved;
  }
  if (rewritten) sort_written(self);
  for (; one < end; ++one) {
    if (one->position >= given || !read_operand(self, one, args, &moved)) return -1;
    if (moved || rewritten) one->meets = meets_written(self, one);
    meets |= one->meets;
  }
  self->known = true;
  return meets || self->written_meet;
}

static PyObject* guard_call(PyObject* object, PyObject* const* args, Py_ssize_t given) {
  Guard* self = (Guard*)object;
  const int meeting = find_meeting(self, args, given);
  if (!meeting) return PyObject_Vectorcall(self->compiled, args, given, NULL);
  if (meeting < 0) {  // an argument without an address, or too few of them
    PyErr_Clear();
  } else {
    PyObject* told = PyObject_CallNoArgs(self->met);
    if (!told) return NULL;
    Py_DECREF(told);
  }
  return PyObject_Vectorcall(self->unfused, args, given, NULL);
}

static void guard_dealloc(PyObject* object) {
  Guard* self = (Guard*)object;
  PyMem_Free(self->operands);
  PyMem_Free(self->sorted);
  Py_XDECREF(self->compiled);
  Py_XDECREF(self->unfused);
  Py_XDECREF(self->met);
  Py_TYPE(object)->tp_free(object);
}

// Guard(compiled, unfused, met, data_ptr, written, operands): operands are (position, itemsize, fixed), the first
// `written` of them written; `met` is called before `unfused`.
static int guard_init(PyObject* object, PyObject* args, PyObject*) {
  Guard* self = (Guard*)object;
  PyObject *compiled, *unfused, *met, *operands;
  unsigned long long data_ptr;
  if (!PyArg_ParseTuple(args, "OOOKnO!", &compiled, &unfused, &met, &data_ptr, &self->written, &PyTuple_Type,
                        &operands))
    return -1;
  self->data_ptr = (DataPtr)data_ptr;
  self->count = PyTuple_GET_SIZE(operands);
  self->operands = (Operand*)PyMem_Calloc(self->count + 1, sizeof(Operand));
  self->sorted = (Operand**)PyMem_Calloc(self->written + 1, sizeof(Operand*));
  if (!self->operands || !self->sorted) {
    PyErr_NoMemory();
    return -1;
  }
  self->compiled = Py_NewRef(compiled);
  self->unfused = Py_NewRef(unfused);
  self->met = Py_NewRef(met);
  for (Py_ssize_t i = 0; i < self->count; ++i) {
    Operand* one = &self->operands[i];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(operands, i), "nLL", &one->position, &one->itemsize, &one->fixed)) return -1;
  }
  return 0;
}

static PyMethodDef guard_methods[] = {
    {"call", (PyCFunction)(void (*)(void))guard_call, METH_FASTCALL, "call(*args) -> what the graph gives"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject guard_type = {PyVarObject_HEAD_INIT(NULL, 0)};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuseplan_overlap", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_fuseplan_overlap(void) {
  guard_type.tp_name = "fuseplan_overlap.Guard";
  guard_type.tp_basicsize = sizeof(Guard);
  guard_type.tp_flags = Py_TPFLAGS_DEFAULT;
  guard_type.tp_new = PyType_GenericNew;
  guard_type.tp_init = guard_init;
  guard_type.tp_dealloc = guard_dealloc;
  guard_type.tp_methods = guard_methods;
  if (PyType_Ready(&guard_type) < 0) return NULL;
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  shape_name = PyUnicode_InternFromString("shape");
  stride_name = PyUnicode_InternFromString("stride");
  PyObject* result = data_ptr_name && shape_name && stride_name ? PyModule_Create(&module) : NULL;
  if (result && PyModule_AddObjectRef(result, "Guard", (PyObject*)&guard_type) < 0) Py_CLEAR(result);
  return result;
}
