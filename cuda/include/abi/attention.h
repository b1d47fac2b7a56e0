// abi/attention.h    see ../abi.h
#pragma once
