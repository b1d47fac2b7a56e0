// abi/elementwise.h    see ../abi.h
#pragma once
